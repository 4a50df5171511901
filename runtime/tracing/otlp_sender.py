"""Messages of OTLP over HTTP, sent from a thread that may wait."""

import contextlib
import gzip
import logging
import os
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Self
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, OpenerDirector, Request, build_opener

from opentelemetry.util.re import parse_env_headers

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0  # before the second try; it doubles
_IS_TRANSIENT = frozenset({429, 502, 503, 504})
_COMPRESSIONS: Mapping[str, Callable[[bytes], bytes]] = {
    "none": bytes, "gzip": gzip.compress, "deflate": zlib.compress,
}  # fmt: skip


@dataclass(slots=True)
class OtlpSender:
    """Posts messages to one collector. A message that fails for `timeout_s` is lost."""

    url: str
    headers: Mapping[str, str]
    timeout_s: float
    compression: str
    opener: OpenerDirector
    _closed: threading.Event = field(default_factory=threading.Event)
    _is_lost: bool = False  # the last message

    @classmethod
    def of_environment(cls) -> Self:
        """Return the sender that OpenTelemetry's variables name. Raise ValueError naming one."""
        url = _variable("ENDPOINT")
        if not os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
            url = f"{url.removesuffix('/')}/v1/traces"
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ValueError("OTEL_EXPORTER_OTLP_ENDPOINT: it is no http or https address")
        compression = _variable("COMPRESSION", "none").lower()
        if compression not in _COMPRESSIONS:
            raise ValueError("OTEL_EXPORTER_OTLP_COMPRESSION: it is none, gzip or deflate")
        try:
            timeout_s = float(_variable("TIMEOUT", "10"))
        except ValueError:
            timeout_s = 0.0
        if not 0 < timeout_s <= 600:
            raise ValueError("OTEL_EXPORTER_OTLP_TIMEOUT: it is not above 0 s and up to 600 s")
        headers = {"Content-Type": "application/x-protobuf"}
        if compression != "none":
            headers["Content-Encoding"] = compression
        headers |= parse_env_headers(_variable("HEADERS"), liberal=True)
        opener = build_opener(HTTPSHandler(context=_tls())) if parts.scheme == "https" else None
        return cls(url, headers, timeout_s, compression, opener or build_opener())

    def send(self, body: bytes) -> bool:
        """Return True when the collector took the message, perhaps at a later try."""
        data = _COMPRESSIONS[self.compression](body)
        until_s, pause_s = time.monotonic() + self.timeout_s, _FIRST_PAUSE_S
        while True:
            error, is_transient = self._try(data, until_s - time.monotonic())
            if not error or not is_transient or time.monotonic() + pause_s > until_s:
                break
            if self._closed.wait(pause_s):
                break
            pause_s *= 2
        if error and not self._is_lost:
            logger.warning("spans are lost: %s: %s", self.url, error)
        elif self._is_lost and not error:
            logger.info("spans are taken again by %s", self.url)
        self._is_lost = bool(error)
        return not error

    def close(self) -> None:
        """Let each message have a single try from now on."""
        self._closed.set()

    def _try(self, data: bytes, timeout_s: float) -> tuple[str, bool]:
        """Return the error, empty without one, and True when another try may do better."""
        request = Request(self.url, data, dict(self.headers), method="POST")
        try:
            with contextlib.closing(self.opener.open(request, timeout=max(timeout_s, 0.1))):
                return "", False
        except HTTPError as error:
            error.close()
            return f"status {error.code}", error.code in _IS_TRANSIENT
        except (OSError, HTTPException, ValueError) as error:
            return str(error) or type(error).__name__, isinstance(error, OSError)


def _variable(name: str, default: str = "") -> str:
    """Return a variable of the exporter; that of traces alone comes first."""
    general = os.environ.get(f"OTEL_EXPORTER_OTLP_{name}")
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or general or default


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=_variable("CERTIFICATE") or None)
    if certificate := _variable("CLIENT_CERTIFICATE"):
        context.load_cert_chain(certificate, _variable("CLIENT_KEY") or None)
    return context
