"""The head of a response."""

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from tandem.frontend.http.response import DirectResponse

Header = tuple[bytes, bytes]


async def begin(header: Header) -> None:
    """Begin a response with this header."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [header]})

    cycle: Any = SimpleNamespace(
        flow=SimpleNamespace(write_paused=False),
        disconnected=False,
        response_complete=False,
        response_started=False,
        keep_alive=True,
        default_headers=[],
        scope={"http_version": "1.1"},
    )
    unused: Any = None
    await DirectResponse(app, cycle)(cycle.scope, unused, unused)


@pytest.mark.parametrize(
    "header",
    [(b"x-a", b"one\r\nx-b: two"), (b"x-a", b"\x00"), (b"x-a", b"\x7f"), (b"x a", b"one")],
)
async def test_a_header_with_a_character_that_none_may_have_ends_the_response(
    header: Header,
) -> None:
    for _ in range(2):  # no wrong name is taken for a known one
        with pytest.raises(RuntimeError, match="character"):
            await begin(header)


async def test_a_header_may_have_tabs_and_bytes_beyond_ascii() -> None:
    await begin((b"x-a", "one\ttwö".encode()))
