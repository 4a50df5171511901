"""The roles of one worker: those that it can have, has begun, and has now."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from tandem.engine.schedule.outputs import LoadStats, SequenceOutput
from tandem.runtime.address import EndpointAddress
from tandem.runtime.errors import ConfigError, InvalidRequestError, ServiceError, UnavailableError
from tandem.runtime.membership.node import Node
from tandem.runtime.process.lifecycle import Lifecycle, State
from tandem.runtime.store.discovery import decode_card, models_prefix, readable, register_instance
from tandem.runtime.wire.cluster_messages import Instance, RoleName, WorkerRole, role_names
from tandem.worker.role import Details, Role, TicketOwner

logger = logging.getLogger(__name__)

# A change of roles waits this long for work in hand; then other workers go on with it.
HANDOVER_S = 0.5
START_TIMEOUT_S = 5.0  # of a role that the worker takes up for the first time


class Roles:
    """The roles of a worker, of which it has `initial` at first.

    One change happens at a time. What a role has begun ends with `close`.
    """

    def __init__(self, node: Node, lifecycle: Lifecycle, initial: WorkerRole) -> None:
        self._node = node
        self._lifecycle = lifecycle
        self._initial = initial
        self._known: dict[RoleName, Role] = {}
        self._started: set[RoleName] = set()
        self._active: dict[RoleName, str] = {}  # |-> the key of its registration
        self._changing = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()

    @property
    def current(self) -> WorkerRole:
        """The role that the worker has now."""
        if len(self._active) == 2:
            return "both"
        return next(iter(self._active), self._initial)

    @property
    def instance(self) -> Instance:
        """The record of the worker, in one of the roles that it has now."""
        name = next(iter(self._active), next(iter(self._known)))
        return self._node.instance(self._known[name].endpoint)

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        """Give the outputs of one step to every role that has begun."""
        for name in self._started:
            self._known[name].on_outputs(outputs)

    @property
    def tickets(self) -> TicketOwner | None:
        """The owner of this worker's own tickets, where it has any."""
        roles = (self._known[name] for name in self._started)
        return next((role.tickets for role in roles if role.tickets is not None), None)

    def on_notification(self, rank: int, data: bytes) -> None:
        """Give a message of the transfer plane to the owner of the blocks; drop it without one."""
        if (tickets := self.tickets) is not None:
            tickets.on_notification(rank, data)

    def loaded(self, load: LoadStats) -> None:
        """Give the engine's load to every role that has begun."""
        for name in self._started:
            self._known[name].loaded(load)

    def details(self, load: LoadStats) -> Details:
        """Return the lines of `tandem status` of the roles that the worker has now."""
        found: Details = {}
        for name in self._active:
            found |= self._known[name].details(load)
        return found

    async def begin(self, known: Sequence[Role]) -> None:
        """Take up the first role; `known` are all that the worker can have."""
        self._known = {role.name: role for role in known}
        async with self._changing:
            for name in role_names(self._initial):
                await self._take_up(self._known[name])

    async def drain(self) -> None:
        """Take no new work, and wait for the work in hand; a change under way ends before."""
        async with self._changing:
            draining = [self._known[name].drain() for name in self._started]
            await asyncio.gather(*draining, self._node.withdraw())

    async def close(self) -> None:
        """End what the roles have begun."""
        await self._stack.aclose()

    async def change(self, wanted: WorkerRole) -> None:
        """Take up the roles of `wanted` and lay down the others; pool and prefix cache stay.

        Raises UnavailableError during another change, InvalidRequestError for the last decode
        worker of a model, and ServiceError when etcd or NATS is away; the role is then as before.
        """
        if self._changing.locked() or self._lifecycle.state is State.DRAINING:
            raise UnavailableError(f"{self._node.instance_id} is changing its role, or ending")
        async with self._changing:
            names = role_names(wanted)
            for name in names:
                await self._start_in_time(self._known[name])
            if "decode" in self._active and "decode" not in names:
                await self._withdraw_decode()
            for name in names:
                if name not in self._active:
                    await self._take_up(self._known[name])
            for name in self._started.difference(names):
                await self._lay_down(self._known[name])
            logger.info("worker %s is now: %s", self._node.instance_id, self.current)

    async def _take_up(self, role: Role) -> None:
        await self._start(role)
        await role.take_up()
        await self._register(role)

    async def _register(self, role: Role) -> None:
        instance = self._node.instance(role.endpoint)
        # before anyone can find it: the status that they ask for has the role
        self._active[role.name] = role.endpoint.instance_key(instance.instance_id)
        await register_instance(self._node, instance)

    async def _start(self, role: Role) -> None:
        """Start a role, once; a start that fails leaves nothing behind."""
        if role.name in self._started:
            return
        async with contextlib.AsyncExitStack() as stack:
            await role.start(stack)
            await self._stack.enter_async_context(stack.pop_all())
        self._started.add(role.name)

    async def _start_in_time(self, role: Role) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._start(role)
        except TimeoutError as error:
            raise ServiceError(
                f"{self._node.instance_id} could not begin the role {role.name} within "
                f"{START_TIMEOUT_S:g} s: etcd or NATS is away; its role is {self.current} still"
            ) from error

    async def _lay_down(self, role: Role) -> None:
        if (key := self._active.pop(role.name, None)) is not None:
            await self._node.take_back(key)
        await role.drain(HANDOVER_S)

    async def _withdraw_decode(self) -> None:
        """Leave the decode workers of the model. Raises InvalidRequestError for the last one.

        The look after the withdrawal decides: of two workers that leave at once, one stays.
        """
        await self._check_not_last()
        await self._node.take_back(self._active["decode"])
        try:
            await self._check_not_last()
        except (InvalidRequestError, ServiceError):
            await self._register(self._known["decode"])
            raise

    async def _check_not_last(self) -> None:
        """Raise InvalidRequestError if the running answers of this worker could go nowhere."""
        model, store = self._node.model, self._node.discovery
        cards = await store.get_prefix(models_prefix(self._node.config.namespace, model))
        for card in readable(cards.values(), decode_card):
            with contextlib.suppress(ConfigError):  # a stranger's card
                key = EndpointAddress.parse(card.endpoint).instance_key(card.instance_id)
                if card.instance_id != self._node.instance_id and await store.get_prefix(key):
                    return
        raise InvalidRequestError(
            f"role: {self._node.instance_id} is the last decode worker of {model}", param="role"
        )
