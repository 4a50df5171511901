"""Prometheus metrics: each name is made once per process; served over HTTP, beside two probes."""

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import TypeVar

from prometheus_client import Counter, Gauge, Histogram, MetricsHandler
from prometheus_client.metrics import MetricWrapperBase

logger = logging.getLogger(__name__)

# From one decode step on a GPU to a long request on a laptop.
LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip

_metrics: dict[str, MetricWrapperBase] = {}
_M = TypeVar("_M", bound=MetricWrapperBase)


def counter(name: str, help: str, labels: Sequence[str] = ()) -> Counter:
    """Return the process's counter `tandem_{name}`, made at the first call."""
    return _named(f"tandem_{name}", Counter, lambda full: Counter(full, help, labels))


def gauge(name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
    """Return the process's gauge `tandem_{name}`, made at the first call."""
    return _named(f"tandem_{name}", Gauge, lambda full: Gauge(full, help, labels))


def gateway_gauge(name: str, help: str, labels: Sequence[str]) -> Gauge:
    """Return the process's gauge `vllm:{name}`, which inference gateways read."""
    return _named(f"vllm:{name}", Gauge, lambda full: Gauge(full, help, labels))


def histogram(
    name: str,
    help: str,
    labels: Sequence[str] = (),
    buckets: Sequence[float] = LATENCY_BUCKETS_S,
) -> Histogram:
    """Return the process's histogram `tandem_{name}`, made at the first call; in seconds."""
    return _named(
        f"tandem_{name}", Histogram, lambda full: Histogram(full, help, labels, buckets=buckets)
    )


def _named(name: str, kind: type[_M], make: Callable[[str], _M]) -> _M:
    metric = _metrics.get(name)
    if metric is None:
        metric = _metrics[name] = make(name)
    assert isinstance(metric, kind), f"{name} is a {type(metric).__name__}"
    return metric


class _Handler(MetricsHandler):
    """Metrics and probes.

    Every scraper gets the text format: OpenMetrics of the client spells `vllm:` as `vllm_`.
    """

    is_ready: Callable[[], bool]

    def do_GET(self) -> None:
        if self.path == "/live":
            self._answer(HTTPStatus.OK, b'{"status":"live"}')
        elif self.path == "/health":
            if self.is_ready():
                self._answer(HTTPStatus.OK, b'{"status":"ready"}')
            else:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b'{"status":"notready"}')
        else:
            del self.headers["Accept"]
            super().do_GET()

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


def serve_metrics(
    port: int, host: str = "127.0.0.1", is_ready: Callable[[], bool] = lambda: True
) -> tuple[int, Callable[[], None]]:
    """Serve /metrics, /live and /health on a thread of its own; return its port and the stop.

    /health is 503 while not `is_ready`. Port 0 is any free port. Raise OSError.
    """
    handler = type("Handler", (_Handler,), {"is_ready": staticmethod(is_ready)})
    server = (_Server6 if ":" in host else ThreadingHTTPServer)((host, port), handler)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    logger.info("metrics on http://%s:%d/metrics", host, server.server_port)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop
