"""An API of the frontend: the work that a body asks for, and the shape of its errors."""

import asyncio
from collections.abc import Coroutine
from typing import Protocol

import msgspec

from tandem.frontend.access.limits import Charge
from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.http.exchange import ErrorShape, Exchange
from tandem.frontend.telemetry.request_log import RequestRecord
from tandem.runtime.context import RequestContext

Work = Coroutine[None, None, None]
_SMALL_BYTES = 256 * 1024  # of a body; less takes a millisecond or two


class Call(msgspec.Struct):
    """One request on its way to an answer."""

    exchange: Exchange
    context: RequestContext
    record: RequestRecord
    owner: str = ""  # the name of the API key; empty without keys
    charge: Charge | None = None  # to the client's limit, once the request has a plan
    clamps_max_tokens: bool = False  # to what the prompt leaves, whatever the config says
    keeps_body: bool = False  # its images are needed up to the end of the answer

    @property
    def ignored(self) -> Ignored:
        """The fields that the answer leaves out of account."""
        return self.exchange.ignored


async def respond(answer: object, call: Call) -> None:
    """Answer with an object, as JSON."""
    headers = call.exchange.id_headers(call.context.id)
    await call.exchange.respond(200, msgspec.json.encode(answer), headers)


async def let_others_run(num_bytes: int) -> None:
    """Let the streams go on between two passes over a body of so many bytes."""
    if num_bytes > _SMALL_BYTES:
        await asyncio.sleep(0)


class Api(Protocol):
    """The meaning of the bodies that are posted to one path."""

    @property
    def errors(self) -> ErrorShape:
        """The shape of errors on this path."""

    async def prepare(self, raw: bytes, call: Call) -> Work:
        """Return the work of answering a body. It has not begun.

        Raises InvalidRequestError naming the field at fault.
        """
