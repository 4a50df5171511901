"""The load that judges clusters: it misses no request without a right answer."""

import asyncio
import json

import pytest
from aiohttp import web

from tests.services import PATIENCE_S, eventually
from tests.stream_load import StreamLoad


class Server:
    """A frontend whose answers are sums of prompts, until it fails."""

    url = ""
    fault = ""
    num_silent = 0

    def __init__(self) -> None:
        self.end = asyncio.Event()
        app = web.Application()
        app.router.add_post("/v1/completions", self._answer)
        self.runner = web.AppRunner(app)

    async def __aenter__(self) -> "Server":
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end.set()
        await self.runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.fault == "silent":
            self.num_silent += 1
            await self.end.wait()
        if self.fault == "503":
            raise web.HTTPServiceUnavailable
        text = str(sum((await request.json())["prompt"]) + (self.fault == "wrong"))
        headers = {"x-tandem-prefill": "local", "x-tandem-prefill-reason": "5 <= 9"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await response.write(f"data: {json.dumps({'choices': [{'text': text}]})}\n".encode())
        if self.fault != "broken off":
            await response.write(b"data: [DONE]\n")
        return response


@pytest.mark.parametrize(
    ("fault", "noted"),
    [("refused", "ConnectionRefused"), ("503", "503"), ("broken off", "broke off"), ("wrong", "")],
)
async def test_a_request_without_a_right_answer_is_judged(fault: str, noted: str) -> None:
    server = Server()
    async with server, StreamLoad(lambda: server.url, "model") as load:
        await load.take_references()
        async with load.running() as whole:
            pass
        whole.judge("whole")
        assert whole.why_local == {"N <= N": whole.num_right}
        async with load.running() as record:
            server.fault = fault
            if fault == "refused":
                await server.runner.cleanup()
            await eventually(lambda: any(noted in each for each in record.failed + record.wrong))
        with pytest.raises(AssertionError):
            record.judge(fault)


async def test_callers_hang_up_on_a_server_that_falls_silent() -> None:
    server = Server()
    async with server, StreamLoad(lambda: server.url, "model") as load:
        await load.take_references()
        async with asyncio.timeout(PATIENCE_S), load.running(hangs_up=True):
            server.fault = "silent"
            await eventually(lambda: server.num_silent > 0)
