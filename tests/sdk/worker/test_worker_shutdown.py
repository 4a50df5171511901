"""The orderly end of a worker, by a call and by a signal."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError, IncompleteError, ServiceError, UnavailableError
from tandem.runtime.process.lifecycle import EXIT_IMPATIENT
from tandem.sdk import Context, DistributedRuntime, worker
from tandem.sdk.worker import decorators
from tandem.sdk.worker.serving import GIVE_UP_S
from tests.processes import cluster_variables
from tests.sdk.kit_pair import PATIENCE_S, Pair, Seen, data_of
from tests.services import eventually

WORKER = Path(__file__).parent / "signal_worker.py"


async def test_the_end_lets_running_requests_finish_and_takes_no_new_one(pair: Pair) -> None:
    seen, context = Seen(), Context()
    client = await pair.serve(seen.generate)
    [instance] = client.instances()
    responses = await client.generate(None, annotated=False, context=context)
    await anext(responses)
    pair.worker.shutdown()
    await eventually(lambda: client.instance_ids() == [])
    assert not pair.serving[0].done()
    late = await pair.caller.client.open(instance.address, "a.b.c", b"", Context().request_context)
    with pytest.raises(UnavailableError):
        await anext(late)
    context.stop_generating()
    assert [item async for item in responses][-1] == "the end"
    await asyncio.wait_for(pair.serving[0], PATIENCE_S)


async def test_what_is_left_when_the_time_is_up_ends_as_incomplete(pair: Pair) -> None:
    seen = Seen()
    client = await pair.serve(seen.generate)
    responses = await client.generate(None)
    await anext(responses)
    pair.worker.shutdown()
    with pytest.raises(IncompleteError, match="the worker stopped"):
        await data_of(responses)
    await asyncio.wait_for(pair.serving[0], PATIENCE_S)
    assert seen.has_ended.is_set() and seen.contexts[0].is_killed()


async def test_an_ungraceful_end_does_not_wait_for_requests(runtime_config: RuntimeConfig) -> None:
    async with Pair(runtime_config.model_copy(update={"drain_timeout_s": 1000.0})) as pair:
        seen = Seen()
        client = await pair.serve(seen.generate, graceful_shutdown=False)
        responses = await client.generate(None)
        await anext(responses)
        pair.worker.shutdown()
        with pytest.raises(IncompleteError):
            await data_of(responses)
        await asyncio.wait_for(pair.serving[0], PATIENCE_S)


async def test_a_handler_that_will_not_end_does_not_hold_the_process(pair: Pair) -> None:
    release = asyncio.Event()

    async def stubborn(request: Any) -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "done"

    client = await pair.serve(stubborn)
    responses = await client.generate(None)
    await eventually(lambda: pair.worker.served[client.address].counts.num_running == 1)
    pair.worker.shutdown()
    await asyncio.wait_for(pair.serving[0], PATIENCE_S + GIVE_UP_S)
    release.set()
    with pytest.raises(IncompleteError):
        await data_of(responses)


async def test_every_endpoint_of_a_process_ends_and_its_records_go(pair: Pair) -> None:
    await pair.worker.put("/tandem/x/models/m/1", b"{}")
    clients = [await pair.serve(lambda request: request, path) for path in ("a.b.c", "d.e.f")]
    pair.worker.shutdown()
    await asyncio.wait_for(asyncio.gather(*pair.serving), PATIENCE_S)
    assert await pair.caller.discovery.get_prefix("/tandem/x/models/m/") == {}
    await eventually(lambda: not any(client.instance_ids() for client in clients))


async def test_ending_a_serve_task_takes_its_endpoint_only(pair: Pair) -> None:
    first = await pair.serve(lambda request: request, "a.b.c")
    second = await pair.serve(lambda request: request, "d.e.f")
    pair.serving[0].cancel()
    await eventually(lambda: first.instance_ids() == [])
    assert await data_of(await second.generate(1)) == [1]


async def test_an_endpoint_is_not_served_before_the_runtime_is_connected(
    runtime_config: RuntimeConfig,
) -> None:
    runtime = DistributedRuntime(runtime_config)
    with pytest.raises(ConfigError, match="before the runtime is connected"):
        runtime.endpoint("a.b.c").serve(lambda request: request)


def test_a_static_worker_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="static=True"):
        worker(static=True)


# ---- a process and its signals ----------------------------------------------------------------


@pytest.fixture
def environment(runtime_config: RuntimeConfig) -> dict[str, str]:
    variables = cluster_variables(runtime_config.model_copy(update={"drain_timeout_s": 20.0}))
    return {**variables, "ETCD_ENDPOINTS": runtime_config.etcd_endpoints.removeprefix("http://")}


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


async def start(
    environment: dict[str, str], processes: list[subprocess.Popen[str]]
) -> subprocess.Popen[str]:
    """A process of `signal_worker.py` that has started."""
    process = subprocess.Popen(  # noqa: ASYNC220 - vfork, and no asyncio child watcher
        [sys.executable, str(WORKER)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    processes.append(process)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "here\n"
    return process


async def ended(process: subprocess.Popen[str]) -> tuple[str, int]:
    out, _ = await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
    return out, process.returncode


async def test_a_signal_lets_a_workers_requests_finish_and_a_second_one_does_not(
    pair: Pair, environment: dict[str, str], processes: list[subprocess.Popen[str]]
) -> None:
    client = await pair.caller.endpoint("signal.worker.count").client()
    for num_signals in (1, 2):
        process = await start(environment, processes)
        await client.wait_for_instances(PATIENCE_S)
        context = Context()
        responses = await client.generate(None, annotated=False, context=context)
        await anext(responses)
        process.send_signal(signal.SIGTERM)
        await eventually(lambda: client.instance_ids() == [])
        if num_signals == 1:
            context.stop_generating()
            assert [item async for item in responses][-1] == "the end"
            assert await ended(process) == ("returned\n", 0)
        else:
            process.send_signal(signal.SIGINT)
            assert await ended(process) == ("", EXIT_IMPATIENT)
            responses.cancel()


async def test_a_signal_ends_a_worker_that_serves_nothing(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which a worker sets
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    here, is_closed = asyncio.Event(), asyncio.Event()

    @worker()
    async def wait(runtime: DistributedRuntime) -> None:
        here.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_closed.set()

    running = asyncio.create_task(wait())
    await asyncio.wait_for(here.wait(), PATIENCE_S)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(running, PATIENCE_S)
    assert is_closed.is_set()


def test_a_worker_that_cannot_start_ends_with_one_line(runtime_config: RuntimeConfig) -> None:
    environment = {
        "PYTHONPATH": ":".join(sys.path),
        "ETCD_ENDPOINTS": runtime_config.etcd_endpoints,
        "TANDEM_RUNTIME__CONNECT_ATTEMPTS": "1",
        "NATS_SERVER": "127.0.0.1:9",
    }
    ended = subprocess.run(
        [sys.executable, str(WORKER)], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("error: NATS not reachable at nats://127.0.0.1")
    assert "Traceback" not in ended.stderr


def test_an_error_of_the_setting_is_told_like_a_service_that_is_away(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for error in (ConfigError("lease_ttl_s: soon"), ServiceError("lease_ttl_s: soon")):
        decorators._print_uncaught(type(error), error, None)
        assert capsys.readouterr().err == "error: lease_ttl_s: soon\n"
