"""OpenTelemetry in this process: decided once, when it joins its cluster.

`OTEL_EXPORTER_OTLP_ENDPOINT` is all it takes. Without that variable nothing of OpenTelemetry is
imported, unless `opentelemetry-instrument` has set up a provider.
"""

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from tandem.runtime.extras import install_command
from tandem.runtime.tasks import ends_within

if TYPE_CHECKING:
    from tandem.runtime.tracing.otel_tracer import Tracer

logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_FLUSH_S = 2.0  # for the last spans at the end; a collector that hangs holds up nothing longer

_tracer: "Tracer | None" = None


def tracer() -> "Tracer | None":
    """Return the tracer of this process; None where nothing takes spans."""
    return _tracer


@contextlib.asynccontextmanager
async def traced(component: str, instance_id: str) -> AsyncIterator[None]:
    """Let this process have spans while the body runs, if its environment asks for them.

    Raise nothing: without the packages, or with settings that are wrong, there are no spans.
    """
    global _tracer
    if _tracer is not None:  # of another node in this process
        yield
        return
    provider, is_ours = None, False
    try:
        provider, is_ours = _find_provider(component, instance_id)
        _tracer = None if provider is None else new_tracer(provider, takes_whole=is_ours)
    except ImportError as error:
        logger.warning("no traces: %s; %s", error, install_command("otel"))
    except Exception as error:  # whatever the packages make of their settings
        logger.warning("no traces: %s", error)
    try:
        yield
    finally:
        _tracer = None
        if is_ours:
            await _shut_down(provider)


def _find_provider(component: str, instance_id: str) -> tuple[Any, bool]:
    """Return the provider of spans, None without one, and True when it is ours to shut down."""
    api = sys.modules.get("opentelemetry.trace")  # loaded by `opentelemetry-instrument`
    if api is not None:
        provider = api.get_tracer_provider()
        if not isinstance(provider, api.ProxyTracerProvider):
            return provider, False
    if not any(os.environ.get(name) for name in _ENDPOINTS) or _is_off():
        return None, False
    from tandem.runtime.tracing.otel_export import new_provider

    return new_provider(component, instance_id), True


def _is_off() -> bool:
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return is_disabled or (os.environ.get("OTEL_TRACES_EXPORTER") or "otlp") != "otlp"


def new_tracer(provider: Any, *, takes_whole: bool = False) -> "Tracer":
    """Return the tracer of a provider, whose exporter may take requests whole."""
    from tandem.runtime.tracing.otel_tracer import Tracer

    return Tracer(provider, takes_whole=takes_whole)


async def _shut_down(provider: Any) -> None:
    """Send the last spans, on a thread that cannot keep the process alive."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def work() -> None:
        with contextlib.suppress(Exception):
            provider.shutdown()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the time was over
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=work, name="last-spans", daemon=True).start()
    if not await ends_within(done.wait(), _FLUSH_S):
        logger.warning("the last spans were not sent: the collector does not answer")
