"""Streams of known tokens, and the text that arrives of each."""

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from tandem.bench.client.http import ConnectionPool, ExchangeError
from tandem.bench.client.wire import SseParser, carries_output, decode_chunk
from tandem.frontend.tokens.detokenizer import DetokenizerFactory
from tandem.models.paths import BUNDLED_MODEL
from tandem.sdk.sample_engine import FIRST_TOKEN_ID, VOCAB_SIZE, expected_tokens

PROMPT_TOKENS = 8
PATH = "/v1/completions"


@dataclass(slots=True)
class Stream:
    """One answer as it arrives, and the expected one."""

    model: str
    prompt: list[int]
    num_tokens: int
    expected_text: str
    instance_id: str = ""  # of the worker that began it
    text: str = ""
    num_generated: int | None = None  # as `usage` has it
    error: str = ""
    is_over: bool = False
    times_s: list[float] = field(default_factory=list)  # perf_counter, of each piece of text
    on_text: Callable[[], None] = lambda: None
    _sse: SseParser = field(default_factory=SseParser)

    @property
    def is_right(self) -> bool:
        """True for an answer with every token once, in order, and its end."""
        is_whole = self.is_over and not self.error
        return (
            is_whole and self.text == self.expected_text and self.num_generated == self.num_tokens
        )

    @property
    def description(self) -> str:
        """The error, or the number of right tokens."""
        if self.error:
            return f"{self.model} at {self.instance_id or 'no worker'}: {self.error}"
        pairs = enumerate(zip(self.text, self.expected_text, strict=False))
        same = next((i for i, (ours, theirs) in pairs if ours != theirs), len(self.text))
        return (
            f"{self.model} at {self.instance_id}: {self.num_generated} of {self.num_tokens} "
            "tokens, "
            f"{len(self.text)} characters, right up to number {same}"
        )

    def gap_s(self, since_s: float) -> float:
        """Return the longest silence in seconds that ended after `since_s`; 0 without one."""
        times = zip(self.times_s, self.times_s[1:], strict=False)
        return max((after - before for before, after in times if after >= since_s), default=0.0)

    def body(self) -> bytes:
        """Return the body of the request."""
        return msgspec.json.encode(
            {
                "model": self.model,
                "prompt": self.prompt,
                "max_tokens": self.num_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    # ---- the response's sink ------------------------------------------------------------------

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.instance_id = headers.get(b"x-tandem-decode-instance", b"").decode()
        if status != 200:
            self.error = f"HTTP {status}"

    def on_body(self, data: bytes, now_s: float) -> None:
        for event in self._sse.feed(data):
            if event == b"[DONE]":
                self.is_over = True
            elif not self.error:
                self._take(event, now_s)

    def _take(self, event: bytes, now_s: float) -> None:
        chunk = decode_chunk(event)
        if chunk.error is not None:
            self.error = chunk.error.message
        self.text += "".join(choice.text or "" for choice in chunk.choices)
        if carries_output(chunk):
            self.times_s.append(now_s)
            self.on_text()
        if chunk.usage is not None:
            self.num_generated = chunk.usage.completion_tokens


class StreamMaker:
    """A maker of streams with prompts of their own, and with the text of their tokens."""

    def __init__(self, seed: int = 0, folder: Path = BUNDLED_MODEL) -> None:
        self._random = random.Random(seed)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._texts = DetokenizerFactory(tokenizer)

    def make(self, model: str, num_tokens: int) -> Stream:
        """Return a stream that is not sent yet."""
        draw = self._random.randrange
        prompt = [draw(FIRST_TOKEN_ID, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
        text = self._texts.decode(expected_tokens(prompt, num_tokens))
        return Stream(model, prompt, num_tokens, text)


class Streams:
    """Many streams at once. `well_begun` is set when each of them has `num_pieces` of text."""

    def __init__(self, url: str, streams: Iterable[Stream], num_pieces: int) -> None:
        self.streams = list(streams)
        self.well_begun = asyncio.Event()
        self._pool = ConnectionPool(url)
        self._num_waited_for = len(self.streams)
        self._num_pieces = num_pieces

    async def run(self) -> None:
        """Send all, and return when all are over, failed or not."""
        try:
            await asyncio.gather(*(self._read(stream) for stream in self.streams))
        finally:
            self._pool.close()

    async def _read(self, stream: Stream) -> None:
        stream.on_text = lambda: self._note(stream)
        body = stream.body()
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: {self._pool.host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}"
        )
        try:
            connection = await self._pool.acquire()
            await connection.exchange(f"{head}\r\n\r\n".encode() + body, stream)
            self._pool.release(connection)
        except ExchangeError as error:
            stream.error = f"{error.kind}: {error}"
        finally:
            if len(stream.times_s) < self._num_pieces:
                self._count()

    def _note(self, stream: Stream) -> None:
        if len(stream.times_s) == self._num_pieces:
            self._count()

    def _count(self) -> None:
        self._num_waited_for -= 1
        if self._num_waited_for == 0:
            self.well_begun.set()
