"""Text models behind a frontend: a worker whose answers a test lists."""

import asyncio
from typing import Any

import msgspec

from tandem.runtime.context import RequestContext
from tandem.runtime.plane.server import Responder
from tandem.runtime.wire.messages import TextRequest
from tests.frontend.frontend_stack import FakeWorker, Stack, TextScript
from tests.services import eventually

TEXT_MODEL = "test/text"


def says(*answers: dict[str, Any] | bytes, error: Exception | None = None) -> TextScript:
    """Sends these answers one by one, then returns, or raises."""

    async def script(_request: TextRequest, _context: RequestContext, responder: Responder) -> None:
        for answer in answers:
            responder.send(answer if isinstance(answer, bytes) else msgspec.json.encode(answer))
            await asyncio.sleep(0)
        await responder.finish()
        if error is not None:
            raise error

    return script


def delta(content: str | None, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    """A chunk of a chat."""
    content_part = {} if content is None else {"content": content}
    choice = {"index": 0, "delta": content_part | more, "finish_reason": finish_reason}
    return {"choices": [choice]}


def piece(text: str, finish_reason: str | None = None, index: int = 0) -> dict[str, Any]:
    """A chunk of completions."""
    return {"choices": [{"index": index, "text": text, "finish_reason": finish_reason}]}


async def add_text_worker(stack: Stack, script: TextScript, **fields: Any) -> FakeWorker:
    """One more worker of TEXT_MODEL, known to the frontend."""
    own: dict[str, Any] = {"model": TEXT_MODEL, "endpoint": "pipeline.backend.generate"}
    worker = await stack.add_worker(model_input="text", text_script=script, **own | fields)
    await eventually(lambda: worker.instance_id in stack.server.catalog.instances)
    return worker
