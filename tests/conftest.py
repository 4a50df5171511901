"""What all tests share: uvloop, and one real NATS and etcd for the session."""

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import settings

from tandem.runtime.address import new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.tracing import otel
from tests.apart import move_apart
from tests.services import EtcdServer, NatsServer

# gRPC reads it when it is imported: its fork handlers disturb calls of other threads
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported
    # Triton's interpreter multiplies by NumPy's OpenBLAS. Its kernels for newer processors round a
    # row by its place among the others, which no GPU does. Read when NumPy is first imported.
    if "numpy" in sys.modules:
        raise pytest.UsageError(
            "NumPy was imported before tests/conftest.py could choose OpenBLAS's kernels, by which "
            "Triton's interpreter rounds as a GPU does: run pytest without what imports it"
        )
    os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"
WAITING_ROOMS = {"soak", "e2e", "launch", "examples"}  # whole clusters, mostly
# Processes of tests import helpers as `tests.room.helper`, too.
ROOT = str(Path(__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))


# Loaded machines take their time.
settings.register_profile("tandem", deadline=None)
settings.load_profile("tandem")


def pytest_configure(config: pytest.Config) -> None:
    """Report what uvloop finds open at the end of a test, as a warning.

    As an error it would interrupt uvloop while it closes, which then waits for ever.
    """
    config.addinivalue_line("filterwarnings", "default:unclosed resource:ResourceWarning")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector: modules and tests stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that load ucxx in processes of their own: NIXL must not share one with it.

    Where files run side by side, those that mostly wait come first, and not alone at the end.
    """
    move_apart("ucx", items)
    if "triton.runtime.interpreter" in sys.modules:
        from tests.interpreter import hasten

        hasten()
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: not WAITING_ROOMS & set(item.path.parts))


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
    """End a parallel run at once when a test kills its process.

    Otherwise pytest-xdist gives the test to the next process, and lets the others go on.
    """
    pytest.exit(f"{crashitem} killed its process")


class Loop(uvloop.Loop):
    """The loop that Tandem runs on. It ends what hangs; pytest-timeout cannot interrupt uvloop."""

    limit_s = 86_400.0  # of the test that runs, where it has one

    def run_until_complete(self, future: Any) -> Any:
        task = asyncio.ensure_future(future, loop=self)
        end = self.call_later(self.limit_s, task.cancel, f"still running after {self.limit_s} s")
        try:
            return super().run_until_complete(task)
        finally:
            end.cancel()


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": Loop}


def pytest_timeout_set_timer(settings: Any) -> None:
    Loop.limit_s = settings.timeout


@pytest.fixture(scope="session")
def nats() -> Iterator[NatsServer]:
    """A NATS for all tests; those that harm it start their own."""
    with NatsServer() as server:
        yield server


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdServer]:
    """An etcd for all tests; those that harm it start their own."""
    with EtcdServer() as server:
        yield server


def _own_namespace(nats: NatsServer, etcd: EtcdServer) -> RuntimeConfig:
    return RuntimeConfig(namespace=new_id(), nats_url=nats.url, etcd_endpoints=etcd.url)


@pytest.fixture
def runtime_config(nats: NatsServer, etcd: EtcdServer) -> RuntimeConfig:
    """A namespace of the test's own on the session's NATS and etcd."""
    return _own_namespace(nats, etcd)


@pytest.fixture(scope="module")
def module_config(nats: NatsServer, etcd: EtcdServer) -> RuntimeConfig:
    """A namespace of the module's own on the session's NATS and etcd."""
    return _own_namespace(nats, etcd)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The spans of one test, in memory; all are sampled."""
    trace = pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry is not installed")
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    processors = pytest.importorskip("opentelemetry.sdk.trace.export")
    exporter = export.InMemorySpanExporter()
    provider = trace.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processors.SimpleSpanProcessor(exporter))
    monkeypatch.setattr(otel, "_tracer", otel.new_tracer(provider))
    return exporter
