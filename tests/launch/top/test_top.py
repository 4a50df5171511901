"""`tandem top` in a terminal, in front of a cluster with a worker that is stopped."""

import asyncio
import fcntl
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec
import pytest

from tandem.runtime.address import EndpointAddress
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.local.ports import free_port
from tandem.runtime.membership.node import Node
from tandem.runtime.plane.server import Responder
from tandem.runtime.wire.cluster_messages import RoleChange, WorkerStatus
from tandem.runtime.wire.messages import TokenDelta, encode
from tests.launch.conftest import Tandem
from tests.launch.top.readings import LOAD, metrics

_ANSI = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")
TIMEOUT_S = 60.0


class Terminal:
    """The end of a pseudo-terminal that a person sits at."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._written = bytearray()
        self._changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(end, self._read)

    def _read(self) -> None:
        try:
            self._written += os.read(self._end, 1 << 16)
        except OSError:  # the process has ended
            asyncio.get_running_loop().remove_reader(self._end)
        self._changed.set()

    async def wait_for(self, *words: str) -> None:
        """Wait until one screen has all of these words."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not all(word in self.screen() for word in words):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pytest.fail(f"no screen with {words}; the last one:\n{self.screen()}")

    async def select(self, row: str) -> None:
        """Press `j` until `row` is selected: those below it move up once they answer in time."""
        async with asyncio.timeout(TIMEOUT_S):
            while f"> {row}" not in self.screen():
                before = len(self._written)
                self.press(b"j")
                while len(self._written) == before:
                    self._changed.clear()
                    await self._changed.wait()

    def screen(self) -> str:
        """Return the last whole screen."""
        *_, last, _ = (b"", b"", *bytes(self._written).split(b"\x1b[H"))
        return _ANSI.sub(b"", last).decode()

    def press(self, keys: bytes) -> None:
        os.write(self._end, keys)


@contextmanager
def top(config: RuntimeConfig, *flags: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    names = ("namespace", "nats_url", "etcd_endpoints")
    cluster = [f"--runtime.{name}={getattr(config, name)}" for name in names]
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem.launch", "top", "--interval", "0.5", *cluster, *flags],
        stdin=theirs, stdout=theirs, stderr=theirs,
        # its size is the terminal's, not that of whoever runs tests
        env={**os.environ, "TERM": "xterm", "COLUMNS": "", "LINES": ""}, start_new_session=True,
    )  # fmt: skip
    try:
        yield Terminal(ours), process
        assert termios.tcgetattr(theirs) == before, "the terminal has its settings back"
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)
        os.close(theirs)


async def ended(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait, TIMEOUT_S)


@asynccontextmanager
async def worker(config: RuntimeConfig, address: str = "") -> AsyncIterator[Node]:
    """Register a decode worker, by default one that answers with its status."""
    async with Node(config, component="decode", model="m") as node:
        endpoint = EndpointAddress(config.namespace, "decode", "generate")
        instance = node.instance(endpoint, address)
        details: dict[str, str | int | float | bool] = {"prompts.local.short": 0}

        load = LOAD

        async def status(payload: bytes, context: RequestContext, answer: Responder) -> None:
            details["prompts.local.short"] = int(details["prompts.local.short"]) + 2
            answer.send(encode(WorkerStatus(instance, "serving", load, details)))

        async def change_role(payload: bytes, context: RequestContext, answer: Responder) -> None:
            nonlocal load
            change = msgspec.msgpack.decode(payload, type=RoleChange)
            load = msgspec.structs.replace(load, role=change.role)
            await status(payload, context, answer)

        async def generate(payload: bytes, context: RequestContext, answer: Responder) -> None:
            answer.send(encode(TokenDelta([5], "length")))

        node.server.register("status", status)
        node.server.register("change_role", change_role)
        node.server.register(str(endpoint), generate)
        await node.put(endpoint.instance_key(node.instance_id), msgspec.json.encode(instance))
        yield node


@asynccontextmanager
async def frontend(config: RuntimeConfig) -> AsyncIterator[None]:
    """Register a frontend whose TTFT metrics grow, and which asks for a key."""
    num_answers = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_answers
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        num_answers += 10
        has_key = "Bearer of-a-test" in request or "/health" in request
        body = metrics(0.15, num_answers).encode() if has_key else b""
        status = 200 if has_key else 403
        writer.write(b"HTTP/1.1 %d S\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, Node(config, component="frontend", serves=False) as node:
        endpoint = EndpointAddress(config.namespace, "frontend", "http")
        instance = node.instance(endpoint, f"{host}:{port}")
        await node.put(endpoint.instance_key(node.instance_id), msgspec.json.encode(instance))
        yield


@pytest.mark.slow
async def test_it_shows_a_cluster_with_a_stopped_worker_and_q_ends_it(
    runtime_config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_A_TEST", "of-a-test")
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # it accepts, and never answers
        host, port = stopped.getsockname()
        async with (
            worker(runtime_config) as well,
            worker(runtime_config, f"{host}:{port}") as silent,
            frontend(runtime_config),
        ):
            with top(runtime_config, "--api-key-env", "KEY_OF_A_TEST") as (terminal, process):
                await terminal.wait_for(well.instance_id[:8], silent.instance_id[:8], "25%")
                await terminal.wait_for("no answer within", "1 without an answer")
                await terminal.wait_for("TTFT", "short", "thresholds: policy")
                await terminal.select(f"decode  {well.instance_id[:8]}")
                for keys, role in ((b"rp", "prefill"), (b"u", "decode")):
                    terminal.press(keys)
                    await terminal.wait_for(f"has the role {role}", f"> {role} ")
                terminal.press(b" ")
                await terminal.wait_for("paused")
                terminal.press(b"q")
                assert await ended(process) == 0


@pytest.mark.slow
async def test_latencies_that_need_a_key_are_a_line_and_sigterm_restores_the_terminal(
    runtime_config: RuntimeConfig,
) -> None:
    async with frontend(runtime_config):
        with top(runtime_config) as (terminal, process):
            await terminal.wait_for("no latencies", "HTTP 403")
            process.send_signal(signal.SIGTERM)
            assert await ended(process) == 0


@pytest.mark.slow
async def test_without_the_cluster_it_waits_and_can_be_ended(runtime_config: RuntimeConfig) -> None:
    away = {"etcd_endpoints": f"http://127.0.0.1:{free_port()}"}
    with top(runtime_config.model_copy(update=away)) as (terminal, process):
        await terminal.wait_for("not reachable", "q quit")
        process.send_signal(signal.SIGINT)
        assert await ended(process) == 0


def test_without_a_terminal_it_names_the_command_for_programs(tandem: Tandem) -> None:
    code, _, errors = tandem("top")
    assert code == 2 and "tandem status --json" in errors
