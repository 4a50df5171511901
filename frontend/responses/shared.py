"""The stored responses of all frontends of a namespace: each is asked of the frontend that has it.

/tandem/{namespace}/responses/{instance_id}    Keeper, under the frontend's lease
"""

import msgspec

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.responses.items import Item, Reading
from tandem.frontend.responses.store import ResponseStore, Stored, output_of
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import (
    InvalidRequestError,
    NotFoundError,
    TandemError,
    UnavailableError,
)
from tandem.runtime.membership.node import Node
from tandem.runtime.plane.server_connection import Responder
from tandem.runtime.printable import short
from tandem.runtime.store.discovery import TypedView
from tandem.runtime.wire.bounds import Message, Name, Payload
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.messages import encode

ENDPOINT = "stored_response"
ASK_TIMEOUT_S = 5.0
_ID_LENGTH = 16  # of `new_id`
_PREFIX = "resp_"


class Keeper(Message, frozen=True, tag=False):
    """A frontend that answers for its stored responses."""

    address: Name  # of its request plane


class StoredQuery(Message, frozen=True):
    """The question for one response of an owner, or the order to delete it."""

    response_id: Name
    owner: Name
    deletes: bool = False


class StoredAnswer(Message, frozen=True):
    """The response."""

    inputs: Payload
    body: Payload
    previous: Name | None = None


_decode_query = decoder(StoredQuery)
_decode_answer = decoder(StoredAnswer)


class SharedResponses:
    """A frontend's own store, and the way to those of the others once it is `shared`."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._node: Node | None = None
        self._keepers: TypedView[Keeper] | None = None

    @property
    def is_on(self) -> bool:
        """False when nothing is kept."""
        return self._store.is_on

    async def share(self, node: Node) -> None:
        """Answer for this store on the node's request plane, and ask the other frontends."""
        self._node = node
        node.server.register(ENDPOINT, self._answer)
        await node.server.start()
        prefix = f"/tandem/{node.config.namespace}/responses/"
        self._keepers = TypedView(node.discovery.watch(prefix), Keeper)
        await self._keepers.ready()
        record = msgspec.json.encode(Keeper(node.server.address))
        await node.put(prefix + node.instance_id, record)

    async def close(self) -> None:
        """Answer no more. Idempotent, also without `share`."""
        if self._keepers is not None:
            await self._keepers.close()
            self._keepers = None
        if self._node is not None:
            await self._node.server.stop()
            self._node = None

    def new_id(self, request_id: str) -> str:
        """Return the id of a request's response, which names its frontend where they share."""
        return f"{_PREFIX}{request_id}{self._node.instance_id if self._node else ''}"

    def put(self, response_id: str, stored: Stored) -> None:
        """Keep a response of this frontend."""
        self._store.put(response_id, stored)

    async def get(self, response_id: str, owner: str, param: str = "response_id") -> Stored:
        """Return a response of this owner. Raises NotFoundError, or UnavailableError."""
        address = self._keeper_of(response_id)
        if address is None:
            return self._store.get(response_id, owner, param)
        return await self._ask(address, StoredQuery(response_id, owner), param)

    async def delete(self, response_id: str, owner: str) -> None:
        """Forget a response of this owner. Raises NotFoundError, or UnavailableError."""
        address = self._keeper_of(response_id)
        if address is None:
            self._store.delete(response_id, owner)
        else:
            query = StoredQuery(response_id, owner, deletes=True)
            await self._ask(address, query, "response_id")

    async def conversation(
        self, response_id: str | None, owner: str, max_bytes: int, *, sees: bool = False
    ) -> list[Item]:
        """Return all items up to the end of a response, for a model that `sees` images or not.

        Raises as `get`, and InvalidRequestError for more bytes than a body may have.
        """
        turns: list[Stored] = []
        num_bytes = 0
        while response_id is not None:
            turns.append(await self.get(response_id, owner, "previous_response_id"))
            response_id = turns[-1].previous
            num_bytes += turns[-1].num_bytes
            if num_bytes > max_bytes:
                raise InvalidRequestError(
                    f"the responses up to `previous_response_id` have over {max_bytes} bytes",
                    param="previous_response_id",
                )
        items: list[Item] = []
        reading = Reading(Ignored(), sees=sees)
        for turn in reversed(turns):
            given = reading.items(turn.inputs, "input", are_past=True)
            answer = reading.items(output_of(turn), "output")
            items += [item for _, item in given + answer]
        return items

    # ---- the other frontends ------------------------------------------------------------------

    def _keeper_of(self, response_id: str) -> str | None:
        """Return the address of the other frontend that has a response; None without one."""
        if self._keepers is None or len(response_id) != len(_PREFIX) + 2 * _ID_LENGTH:
            return None
        keeper = self._keepers.items.get(response_id[-_ID_LENGTH:])
        assert self._node is not None, "there are keepers"
        is_own = keeper is None or response_id.endswith(self._node.instance_id)
        return None if is_own or keeper is None else keeper.address

    async def _ask(self, address: str, query: StoredQuery, param: str) -> Stored:
        assert self._node is not None, "there are keepers"
        try:
            async with RequestContext(timeout_s=ASK_TIMEOUT_S) as context:
                raw = await self._node.client.call(address, ENDPOINT, encode(query), context)
            answer = _decode_answer(raw)
        except NotFoundError as error:
            raise NotFoundError(error.message, param=param) from error
        except TandemError as error:
            raise UnavailableError(
                f"the frontend that stored {short(query.response_id)!r} does not answer: "
                f"{error.message}"
            ) from error
        return Stored(query.owner, answer.previous, answer.inputs, answer.body)

    async def _answer(self, payload: bytes, _: RequestContext, answer: Responder) -> None:
        query = _decode_query(payload)
        stored = self._store.get(query.response_id, query.owner)
        if query.deletes:
            self._store.delete(query.response_id, query.owner)
        answer.send(encode(StoredAnswer(stored.inputs, stored.body, stored.previous)))
