"""A frontend with its page before a fake worker that reports its status, for tests."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from pydantic import SecretStr

from tandem.config.live import parse_live
from tandem.config.model import load_config
from tandem.frontend.config import FrontendConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import TandemError
from tandem.runtime.plane.server import Responder
from tandem.runtime.wire.cluster_messages import LoadReport, RoleChange, WorkerRole, WorkerStatus
from tandem.runtime.wire.messages import GenerateRequest, PrefillReport, TokenDelta, encode
from tests.frontend.frontend_stack import MODEL, FakeWorker, Stack, token_ids
from tests.services import eventually

KEY = "key-of-the-page-in-tests"
HANDOFF = {
    "received": 0.0, "queued": 1.0, "claimed": 3.0, "computed": 8.0, "first_token": 8.5,
    "landed": 9.0, "verified": 9.5, "first_step": 11.0,
}  # fmt: skip


@dataclass
class StatusWorker(FakeWorker):
    """A worker that reports its status, and takes another role."""

    role: WorkerRole = "decode"
    load: tuple[int, int, int] = (3, 1, 40)  # requests that run, that wait; tokens that wait
    num_asked: int = 0
    is_frozen: bool = False
    refusal: TandemError | None = None
    details: dict[str, str | int | float | bool] = field(
        default_factory=lambda: {
            "disagg.policy": "adaptive", "num_queued_jobs": 5, "num_queued_tokens": 900
        }
    )  # fmt: skip

    async def start(self) -> None:
        await super().start()
        self.server.register("status", self._status)
        self.server.register("change_role", self._change_role)

    async def _status(self, _payload: bytes, context: RequestContext, answer: Responder) -> None:
        self.num_asked += 1
        if self.is_frozen:
            await context.cancelled()
            context.raise_if_done()
        load = LoadReport(self.instance_id, "epoch", self.role, *self.load, 100, 60, 10)
        answer.send(encode(WorkerStatus(self.instance(), "serving", load, self.details)))

    async def _change_role(
        self, payload: bytes, context: RequestContext, answer: Responder
    ) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.role = msgspec.msgpack.decode(payload, type=RoleChange).role
        await self._status(payload, context, answer)


async def hand_off(request: GenerateRequest, _context: RequestContext, answer: Responder) -> None:
    """Answer as after a remote prefill."""
    first, second = token_ids("ab")
    report = PrefillReport(
        "remote", "uncached 412 > max_local_prefill_length 200", 0, "prefiller", HANDOFF, "long"
    )
    answer.send(encode(TokenDelta([first], prefill=report)))
    answer.send(encode(TokenDelta([second], finish_reason="length", timeline_ms=HANDOFF)))


def page_config(**fields: Any) -> FrontendConfig:
    return FrontendConfig(port=0, page_key=SecretStr(KEY), **fields)


@asynccontextmanager
async def page_stack(
    model: str = MODEL, config: FrontendConfig | None = None
) -> AsyncIterator[Stack]:
    """A frontend whose client has the key of the page."""
    parse = partial(parse_live, load_config())
    async with Stack(num_workers=0, parse_live=parse, config=config or page_config()) as stack:
        stack.http.headers["authorization"] = f"Bearer {KEY}"
        worker = await stack.add_worker(StatusWorker, model=model)
        await eventually(lambda: worker.instance_id in stack.server.catalog.instances)
        await eventually(lambda: bool(stack.server.catalog.models))
        yield stack


@asynccontextmanager
async def states(stack: Stack, **headers: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The states of one open page."""
    async with stack.http.stream("GET", "/ui/states", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")

        async def parsed() -> AsyncIterator[dict[str, Any]]:
            async for line in response.aiter_lines():
                if line:
                    yield json.loads(line.removeprefix("data: "))

        yield parsed()


async def anext_state(stack: Stack) -> dict[str, Any]:
    async with states(stack) as found:
        return await anext(found)
