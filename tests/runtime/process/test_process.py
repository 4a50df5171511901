"""A process's life: startup, drain, stop, signals, its parent's death, its logs and metrics."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest

from tandem.runtime.address import host_port
from tandem.runtime.process.lifecycle import EXIT_IMPATIENT, Lifecycle, State, freeze_gc, signals
from tandem.runtime.process.metrics import counter, gateway_gauge, gauge, histogram, serve_metrics
from tests.services import eventually


@pytest.fixture(autouse=True)
def heeds_sighup() -> Iterator[None]:
    """Whoever runs the tests may be ignoring it, as `nohup` does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


class Stages:
    """Records what ran, and in which state."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.ran: list[tuple[str, State]] = []

    async def startup(self) -> None:
        self.ran.append(("startup", self.lifecycle.state))

    async def drain(self) -> None:
        self.ran.append(("drain", self.lifecycle.state))

    async def stop(self) -> None:
        self.ran.append(("stop", self.lifecycle.state))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_drains_and_stops(number: signal.Signals) -> None:
    lifecycle = Lifecycle()
    stages = Stages(lifecycle)
    running = asyncio.create_task(
        lifecycle.run(startup=stages.startup, drain=stages.drain, stop=stages.stop)
    )
    await eventually(lambda: lifecycle.state is State.SERVING)
    os.kill(os.getpid(), number)
    await running
    assert stages.ran == [
        ("startup", State.STARTING),
        ("drain", State.DRAINING),
        ("stop", State.DRAINING),
    ]
    assert lifecycle.state is State.STOPPED


async def test_a_terminal_that_closes_may_say_so_several_times() -> None:
    """Its shell passes SIGHUP on, and then the kernel sends another."""
    ended: list[str] = []
    with signals(lambda: bool(ended), ended.append):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
            await eventually(lambda: bool(ended))
            await asyncio.sleep(0)
    assert ended == ["SIGHUP"]


async def test_a_process_that_nohup_started_outlives_its_terminal() -> None:
    ended: list[str] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals(lambda: bool(ended), ended.append):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            await eventually(lambda: bool(ended))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended == ["SIGTERM"]


def test_what_is_loaded_is_no_longer_looked_at_for_garbage() -> None:
    held, threshold = [[], []], gc.get_threshold()
    try:
        freeze_gc()
        assert not any(each is held for each in gc.get_objects())
        num_collections = gc.get_stats()[0]["collections"]
        wave = [[] for _ in range(2000)]  # of requests, without a cycle
        assert gc.get_stats()[0]["collections"] == num_collections
        assert wave
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)


def test_memory_that_the_start_has_freed_goes_back_to_the_system() -> None:
    """In a process of its own: a malloc that keeps what is freed, as a worker's on a CPU does."""
    script = """
import threading
import psutil
from tandem.engine.memory.host_memory import keep_freed_memory
from tandem.runtime.process.lifecycle import freeze_gc

keep_freed_memory()
loader = threading.Thread(target=lambda: [bytes(100_000) for _ in range(640)])  # 61 MiB
loader.start()
loader.join()
kept = psutil.Process().memory_info().rss
freeze_gc()
print(kept - psutil.Process().memory_info().rss)
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, check=True)
    assert int(done.stdout) > 40 * 2**20


async def test_a_failing_startup_stops_and_is_raised() -> None:
    lifecycle = Lifecycle()
    stages = Stages(lifecycle)

    async def startup() -> None:
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        await lifecycle.run(startup=startup, drain=stages.drain, stop=stages.stop)
    assert [name for name, _ in stages.ran] == ["stop"]
    assert lifecycle.state is State.STOPPED


async def test_a_shutdown_during_startup_breaks_it_off_and_drains() -> None:
    lifecycle = Lifecycle()
    stages = Stages(lifecycle)

    async def startup() -> None:
        lifecycle.shut_down("changed my mind")
        await asyncio.Event().wait()

    await lifecycle.run(startup=startup, drain=stages.drain, stop=stages.stop)
    assert stages.ran == [("drain", State.DRAINING), ("stop", State.DRAINING)]


async def test_draining_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    lifecycle = Lifecycle(drain_timeout_s=0.05)
    stages = Stages(lifecycle)

    async def startup() -> None:
        lifecycle.shut_down("test")

    async def drain() -> None:
        await asyncio.Event().wait()

    await lifecycle.run(startup=startup, drain=drain, stop=stages.stop)
    assert "after 0.05 s of draining" in caplog.text
    assert stages.ran == [("stop", State.DRAINING)]


def run_python(code: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_second_signal_ends_the_process_at_once() -> None:
    code = """
import asyncio, sys
from tandem.runtime.address import host_port
from tandem.runtime.process.lifecycle import Lifecycle
async def startup(): pass
async def drain():
    print("draining", flush=True)
    await asyncio.Event().wait()
async def main():
    lifecycle = Lifecycle(drain_timeout_s=60)
    asyncio.get_running_loop().call_soon(print, "up")
    asyncio.get_running_loop().call_soon(sys.stdout.flush)
    await lifecycle.run(startup=startup, drain=drain, stop=startup)
asyncio.run(main())
"""
    with run_python(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == EXIT_IMPATIENT


def test_metrics_are_served_and_made_once() -> None:
    counter("test_requests_total", "Requests.", ["place"]).labels("local").inc()
    assert counter("test_requests_total", "Requests.", ["place"]) is counter(
        "test_requests_total", "Requests.", ["place"]
    )
    gauge("test_depth", "Depth.").set(3)
    histogram("test_seconds", "Seconds.").observe(0.1)
    port, stop = serve_metrics(0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            text = response.read().decode()
    finally:
        stop()
    assert 'tandem_test_requests_total{place="local"} 1.0' in text
    assert "tandem_test_depth 3.0" in text
    assert 'tandem_test_seconds_bucket{le="0.1"} 1.0' in text


def test_a_gateway_gauge_keeps_its_name_for_a_scraper_of_openmetrics() -> None:
    host = "::1"
    gateway_gauge("test_waiting", "Waiting.", ["engine"]).labels("0").set(2)
    port, stop = serve_metrics(0, host)
    accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    request = urllib.request.Request(f"http://{host_port(host, port)}/metrics", headers=accept)
    try:
        with urllib.request.urlopen(request) as response:
            assert response.headers["content-type"].startswith("text/plain")
            assert 'vllm:test_waiting{engine="0"} 2.0' in response.read().decode()
    finally:
        stop()
