"""A server under comparison: started, stopped and continued between turns, ended."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from tandem.bench.client.openai import OpenAIClient, PreparedRequest
from tandem.bench.client.record import RequestRecord
from tandem.bench.client.wire import BodyBuilder
from tandem.bench.engines.presets import Case, Engine
from tandem.runtime.errors import ServiceError
from tandem.runtime.local.child_process import log_tail
from tandem.runtime.local.ports import free_port

GUARD = Path(__file__).with_name("guard.py")
GRACE_S = 10.0
POLL_S = 0.05
REQUEST_TIMEOUT_S = 600.0  # the last of a closed loop waits for all others where none is batched
REFUSALS = ("http_400", "http_401", "http_403", "http_415", "http_422")  # no server to wait for


class EngineProcess:
    """The server of one engine; every process below it is stopped, continued and ended with it."""

    def __init__(self, engine: Engine, case: Case, model: Path, run_dir: Path) -> None:
        self.engine = engine
        self.ready_s = 0.0
        self.log_path = run_dir / f"{engine.name}.log"
        port = free_port()
        values = case.values() | {"model": str(model), "port": str(port), "run_dir": str(run_dir)}
        self.client = OpenAIClient(f"http://127.0.0.1:{port}", timeout_s=REQUEST_TIMEOUT_S)
        self.body = BodyBuilder(
            engine.model_name.format(**values),
            ignore_eos=engine.takes_ignore_eos,
            extra=dict(engine.extra_body),
        )
        # bytecode is kept: else every start compiles its modules
        own = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._started_at_s = time.perf_counter()
        with self.log_path.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", str(GUARD), str(GRACE_S), *engine.command_line(values)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=own | engine.environment(values),
                start_new_session=True,
            )

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for the answer to a request for one token; `ready_s` is the time since the start.

        Raises ServiceError with the end of the log when the server ends, refuses the request or
        takes longer than `timeout_s` seconds.
        """
        reason = ""
        try:
            async with asyncio.timeout(timeout_s):
                while not reason:
                    record = await self.ask("a", 1)
                    if record.succeeded:
                        self.ready_s = time.perf_counter() - self._started_at_s
                        return
                    if record.error.startswith(REFUSALS):
                        reason = f"refuses requests: {record.error}: {record.error_message}"
                    elif (code := self._guard.poll()) is not None:
                        reason = f"exited with {code} before it served"
                    else:
                        await asyncio.sleep(POLL_S)
        except TimeoutError:
            reason = f"was not ready after {timeout_s:g} s"
        raise self.error(reason)

    def error(self, reason: str) -> ServiceError:
        """Return an error that names the engine and shows the end of its log."""
        tail = log_tail(self.log_path)
        return ServiceError(f"{self.engine.name} {reason}; its log ({self.log_path}) ends:\n{tail}")

    async def ask(self, prompt: str, num_tokens: int) -> RequestRecord:
        """Send one request that enters no figure."""
        record = RequestRecord(0, 0.0)
        request = PreparedRequest(self.body.encode(prompt, num_tokens))
        await self.client.send(request, record, time.perf_counter())
        return record

    def cpu_s(self) -> float:
        """Return the CPU seconds, user and system, of its processes so far."""
        total_s = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total_s += sum(process.cpu_times()[:2])
        return total_s

    def pause(self) -> None:
        """Stop every process of it: until `resume` it takes no CPU time at all."""
        stopped: set[int] = set()
        while new := [p for p in self._processes() if p.pid not in stopped]:
            self._send(signal.SIGSTOP, new)
            stopped.update(process.pid for process in new)

    def resume(self) -> None:
        self._send(signal.SIGCONT, reversed(self._processes()))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the server run during the body, and stop it again."""
        self.resume()
        try:
            yield
        finally:
            self.pause()

    async def stop(self) -> None:
        """End it and all that it started; return when nothing of it is left."""
        self.client.close()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        await asyncio.to_thread(self._guard.wait)

    def _processes(self) -> list[psutil.Process]:
        """Return every process below the guard, parents first."""
        try:
            return psutil.Process(self._guard.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    @staticmethod
    def _send(number: signal.Signals, processes: Iterable[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
