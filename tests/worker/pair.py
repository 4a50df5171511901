"""Two workers of both roles, and a client of their request plane."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from tandem.decode.config import DisaggConfig
from tandem.decode.worker import DecodeRole
from tandem.prefill.config import PrefillConfig
from tandem.prefill.worker import PrefillRole
from tandem.runtime.address import new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.membership.model_files import read_model_files
from tandem.runtime.wire.cluster_messages import RoleChange, WorkerRole, WorkerStatus
from tandem.runtime.wire.messages import (
    GenerateRequest,
    PrefillPlace,
    PrefillReport,
    SamplingParams,
    StopConditions,
    encode,
    pack_tokens,
)
from tandem.worker.settings import WorkerSettings
from tandem.worker.worker import Worker
from tests.decode.prefill_peer import Answer
from tests.handoff_peer import MODEL, QUEUE, TRANSFER, HandoffPeer, Text, engine_config
from tests.services import eventually


class Both:
    """A worker that begins in `role`, and its role objects.

    `engine` changes the section of that name; `config` is of the disagg section.
    """

    def __init__(
        self,
        runtime: RuntimeConfig,
        model: Path,
        *,
        role: WorkerRole = "both",
        engine: Mapping[str, object] | None = None,
        **config: object,
    ) -> None:
        engine_section = engine_config(model, **(engine or {}))
        settings = WorkerSettings(runtime, engine_section, TRANSFER, QUEUE, MODEL)
        self.worker = Worker(settings, role)
        disagg = DisaggConfig.model_validate({"claim_timeout_ms": 60_000, **config})
        self.decode = DecodeRole(self.worker, disagg, read_model_files(model))
        self.prefill = PrefillRole(self.worker, PrefillConfig())
        self.node = self.worker.node

    async def __aenter__(self) -> "Both":
        await self.worker.startup(self.decode, self.prefill)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.worker.stop()

    def knows(self, other: "Both") -> bool:
        """Each can write to the other, and would ask it."""
        other_id = other.node.instance_id
        link = self.worker.group.links.get(other_id)
        is_linked = link is not None and link.rates is not None
        return is_linked and other_id in self.decode._prefill_instances.items


class Pair:
    """Workers `one` and `two`; the peer computes undisturbed answers and is the client.

    `engine` changes the section of that name of both, `engine_of_one` that of the first.
    """

    def __init__(
        self,
        runtime: RuntimeConfig,
        model: Path,
        *,
        engine: Mapping[str, object] | None = None,
        engine_of_one: Mapping[str, object] | None = None,
        **config: Any,
    ) -> None:
        self.peer = HandoffPeer(runtime, model, "prefill", TRANSFER)
        self.one = Both(
            runtime, model, engine={**(engine or {}), **(engine_of_one or {})}, **config
        )
        self.two = Both(runtime, model, engine=engine, **config)
        self._readers: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Pair":
        for part in (self.peer, self.one, self.two):
            await self._stack.enter_async_context(part)
        await eventually(lambda: self.one.knows(self.two) and self.two.knows(self.one))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        await asyncio.gather(*self._readers)

    async def ask(
        self,
        worker: Both,
        prompt: list[int],
        *,
        num_tokens: int = 6,
        place: PrefillPlace | None = None,
        **changes: object,
    ) -> Answer:
        """Send a prompt to a worker. `changes` are of the request."""
        request = GenerateRequest(
            request_id=new_id(),
            model=MODEL,
            token_ids=pack_tokens(prompt),
            sampling=SamplingParams(temperature=0),
            stop=StopConditions(max_tokens=num_tokens, ignore_eos=True),
            deadline_ms=60_000,
            prefill_place=place,
        )
        request = msgspec.structs.replace(request, **changes)
        answer = Answer(RequestContext(timeout_s=60))
        stream = await self.peer.node.client.open(
            worker.node.server.address, str(worker.decode.endpoint), encode(request), answer.context
        )
        self._readers.add(asyncio.create_task(answer.read(stream)))
        return answer

    async def answered(self, worker: Both, prompt: list[int], **how: Any) -> PrefillReport:
        """Ask, and return the report of the answer, which is the undisturbed one."""
        return await self.checked(await self.ask(worker, prompt, **how), prompt)

    async def checked(self, answer: Answer, prompt: list[int]) -> PrefillReport:
        """Return the report of an answer once it has ended; it is the undisturbed one."""
        assert await answer.whole() == self.undisturbed(prompt)
        assert answer.report is not None
        return answer.report

    async def change(self, worker: Both, role: WorkerRole) -> WorkerStatus:
        """Ask a worker for another role; return its status afterwards."""
        async with RequestContext(timeout_s=60) as context:
            answer = await self.peer.node.client.call(
                worker.node.server.address, "change_role", encode(RoleChange(role)), context
            )
        return msgspec.msgpack.decode(answer, type=WorkerStatus)

    def undisturbed(self, prompt: list[int], num_tokens: int = 6) -> Text:
        stop = StopConditions(max_tokens=num_tokens, ignore_eos=True)
        return self.peer.undisturbed(prompt, SamplingParams(temperature=0), stop)

    async def balanced(self) -> None:
        """Wait until no worker holds a block that is not cached."""
        for each in (self.one, self.two):
            pool = each.worker.engine.block_pool
            await eventually(
                lambda pool=pool: pool.num_free + pool.num_cached == pool.num_blocks  # type: ignore[misc]
            )

    async def forget(self) -> None:
        """Empty the prefix caches."""
        for each in (self.one, self.two):
            await each.worker.loop.call(lambda engine: engine.block_pool.clear_cache())
