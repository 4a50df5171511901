"""One OpenAI request against a server, measured: the record never lies about a failure."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from tandem.bench.client.http import (
    ConnectionPool,
    ExchangeError,
    HttpConnection,
    StaleConnectionError,
)
from tandem.bench.client.record import RequestRecord
from tandem.bench.client.wire import (
    PATHS,
    Chunk,
    Endpoint,
    ErrorBody,
    SseParser,
    carries_output,
    decode_chunk,
)
from tandem.runtime.errors import ServiceError

MAX_ERROR_CHARS = 300


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready to send; `offset_s` is its arrival after the run's start, if it has one."""

    body: bytes
    num_asked_tokens: int | None = None
    offset_s: float | None = None


class ResponseReader:
    """The sink of one response: fills its record as bytes arrive."""

    __slots__ = ("_body", "_is_complete", "_is_stream", "_origin_s", "_record", "_sse")

    def __init__(self, record: RequestRecord, origin_s: float) -> None:
        self._record = record
        self._origin_s = origin_s
        self._sse = SseParser()
        self._body = bytearray()
        self._is_stream = False
        self._is_complete = False

    @property
    def body(self) -> bytes:
        """The whole body of a response that is no stream."""
        return bytes(self._body)

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._record.status = status
        self._record.prefill_place = headers.get(b"x-tandem-prefill", b"").decode("latin-1")
        reason = headers.get(b"x-tandem-prefill-reason", b"")
        self._record.prefill_reason = reason.decode("latin-1")
        content_type = headers.get(b"content-type", b"")
        self._is_stream = status == 200 and content_type.startswith(b"text/event-stream")

    def on_body(self, data: bytes, now_s: float) -> None:
        if not self._is_stream:
            self._body += data
            return
        for event in self._sse.feed(data):
            self._on_event(event, now_s)

    def on_output(self, chunk: Chunk) -> None:
        """Take note of an output event; a place for readers of texts."""

    def finish(self) -> None:
        """Judge the response once its last byte is here."""
        if not self._is_stream and self._record.status != 200:
            self._fail(*_http_error(self._record.status, self.body))
        elif not self._is_stream:
            self._take(self.body)
        elif not self._is_complete and not self._record.error:
            self._fail("incomplete_stream", "the stream ended without a finish reason or [DONE]")
        if not self._record.has_usage:
            self._record.num_output_tokens = len(self._record.output_times_s)

    def _on_event(self, event: bytes, now_s: float) -> None:
        if event == b"[DONE]":
            self._is_complete = True
        elif (chunk := self._take(event)) is not None and carries_output(chunk):
            self._record.output_times_s.append(now_s - self._origin_s)
            self.on_output(chunk)

    def _take(self, data: bytes) -> Chunk | None:
        """Take the fields of a chunk, or of a whole answer; return None for an error."""
        record = self._record
        try:
            chunk = decode_chunk(data)
        except msgspec.DecodeError as exc:
            self._fail("protocol", f"not an OpenAI chunk: {exc}")
            return None
        if chunk.error is not None:
            self._fail(f"stream_error {_code(chunk.error)}", chunk.error.message)
            return None
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                record.finish_reason = choice.finish_reason
                self._is_complete = True
            if choice.tandem is not None:
                record.timeline_ms = choice.tandem.timeline_ms
                record.predicted_ms = choice.tandem.predicted_ms
        if (usage := chunk.usage) is not None:
            record.has_usage = True
            record.num_input_tokens = usage.prompt_tokens
            record.num_output_tokens = usage.completion_tokens or 0
            details = usage.prompt_tokens_details
            record.num_cached_tokens = (details.cached_tokens or 0) if details else 0
        return chunk

    def _fail(self, kind: str, message: str) -> None:
        if not self._record.error:
            self._record.error, self._record.error_message = kind, message[:MAX_ERROR_CHARS]


class OpenAIClient:
    """A sender of prepared requests to one endpoint of one base URL, on kept-alive connections."""

    def __init__(
        self,
        base_url: str,
        endpoint: Endpoint = "completions",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.pool = ConnectionPool(base_url)
        self._timeout_s = timeout_s
        shared = {"Host": self.pool.host, "User-Agent": "tandem-bench", **(headers or {})}
        lines = "".join(f"{name}: {value}\r\n" for name, value in shared.items())
        path = self.pool.path_prefix + PATHS[endpoint]
        self._head = (
            f"POST {path} HTTP/1.1\r\n{lines}Content-Type: application/json\r\nContent-Length: "
        ).encode("latin-1")
        self._get_head = f" HTTP/1.1\r\n{lines}\r\n".encode("latin-1")

    async def send(
        self,
        request: PreparedRequest,
        record: RequestRecord,
        origin_s: float,
        reader: ResponseReader | None = None,
    ) -> None:
        """Send one request and fill its record, failures included; times count from `origin_s`.

        `origin_s` is a perf_counter reading. Cancelling closes the connection. A `reader` of the
        record's own takes the response.
        """
        record.num_asked_tokens = request.num_asked_tokens
        reader = reader or ResponseReader(record, origin_s)
        data = b"%b%d\r\n\r\n%b" % (self._head, len(request.body), request.body)
        try:
            end_s = await self._exchange(data, reader, record, origin_s)
            record.end_s = end_s - origin_s
            reader.finish()
        except ExchangeError as exc:
            record.error, record.error_message = exc.kind, str(exc)
            record.end_s = time.perf_counter() - origin_s

    async def served_models(self) -> list["ServedModel"]:
        """Return the models of GET /v1/models. Raises ServiceError naming the address."""
        try:
            models = msgspec.json.decode(await self.get("/v1/models"), type=_ModelList)
        except msgspec.DecodeError as exc:
            raise ServiceError(f"GET /v1/models of {self.pool.host}: no list of models") from exc
        return models.data

    async def get(self, path: str) -> bytes:
        """Return the body of a GET. Raises ServiceError naming the path and the address."""
        where = f"GET {path} of {self.pool.host}"
        data = b"GET " + (self.pool.path_prefix + path).encode() + self._get_head
        record = RequestRecord(0, 0.0)
        reader = ResponseReader(record, 0.0)
        try:
            async with asyncio.timeout(min(self._timeout_s, 30.0)):
                await self._use(await self.pool.acquire(), data, reader)
        except (ExchangeError, TimeoutError) as exc:
            raise ServiceError(f"{where}: {exc or 'timeout'}") from exc
        if record.status != 200:
            raise ServiceError(f"{where}: HTTP {record.status}")
        return reader.body

    def close(self) -> None:
        self.pool.close()

    async def _exchange(
        self, data: bytes, reader: ResponseReader, record: RequestRecord, origin_s: float
    ) -> float:
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    connection = await self.pool.acquire()
                    record.sent_s = time.perf_counter() - origin_s
                    try:
                        return await self._use(connection, data, reader)
                    except StaleConnectionError:
                        self.pool.num_reconnects += 1
        except TimeoutError as exc:
            raise ExchangeError("timeout", f"no answer within {self._timeout_s:g} s") from exc

    async def _use(self, connection: HttpConnection, data: bytes, reader: ResponseReader) -> float:
        end_s = await connection.exchange(data, reader)
        self.pool.release(connection)
        return end_s


class ServedModel(msgspec.Struct):
    """A model of a server; `max_model_len` is its context in tokens, where the server names it."""

    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[ServedModel]


def _code(error: ErrorBody) -> str:
    return str(error.code or error.type or "unnamed")


def _http_error(status: int, body: bytes) -> tuple[str, str]:
    try:
        error = decode_chunk(body).error
    except msgspec.DecodeError:
        error = None
    if error is None:
        return f"http_{status}", body[:MAX_ERROR_CHARS].decode("utf-8", "replace")
    return f"http_{status} {_code(error)}", error.message
