"""Streams of known tokens, and the text that arrives of each."""

import asyncio
import random
from collections.abc import Callable, Iterable
from itertools import pairwise

from tokenizers import Tokenizer

from tandem.bench.client.openai import OpenAIClient, PreparedRequest, ResponseReader
from tandem.bench.client.record import RequestRecord
from tandem.bench.client.wire import BodyBuilder, Chunk
from tandem.frontend.tokens.codec import Codec
from tandem.frontend.tokens.detokenizer import DetokenizerFactory
from tandem.models.paths import BUNDLED_MODEL
from tandem.sdk.sample_engine import FIRST_TOKEN_ID, VOCAB_SIZE, expected_tokens

PROMPT_TOKENS = 8


class Stream(ResponseReader):
    """One answer as it arrives, and the expected one; the record's times are of perf_counter."""

    def __init__(self, model: str, prompt: list[int], num_tokens: int, expected_text: str) -> None:
        self.record = RequestRecord(0, 0.0)
        super().__init__(self.record, 0.0)
        self.model = model
        self.prompt = prompt
        self.num_tokens = num_tokens
        self.expected_text = expected_text
        self.text = ""
        self.instance_id = ""  # of the worker that began it
        self.struck = ""  # the label of that worker, if it was struck
        self.silence_ms = 0.0  # the longest one after the strike
        self.on_text: Callable[[], None] = lambda: None

    @property
    def is_right(self) -> bool:
        """True for an answer with every token once, in order, and its end."""
        is_whole = self.record.succeeded and self.record.num_output_tokens == self.num_tokens
        return is_whole and self.text == self.expected_text

    @property
    def description(self) -> str:
        """The error, or the number of right tokens."""
        record, where = self.record, f"{self.model} at {self.instance_id or 'no worker'}"
        if record.error:
            return f"{where}: {record.error}: {record.error_message}"
        pairs = enumerate(zip(self.text, self.expected_text, strict=False))
        same = next((i for i, (ours, theirs) in pairs if ours != theirs), len(self.text))
        return (
            f"{where}: {record.num_output_tokens} of {self.num_tokens} tokens, "
            f"{len(self.text)} characters, right up to number {same}"
        )

    def gap_s(self, since_s: float) -> float:
        """Return the longest silence in seconds that ended after `since_s`; 0 without one."""
        times = pairwise(self.record.output_times_s)
        return max((after - before for before, after in times if after >= since_s), default=0.0)

    def request(self) -> PreparedRequest:
        """Return the request for it."""
        body = BodyBuilder(self.model, ignore_eos=False, temperature=1.0)
        return PreparedRequest(body.encode(self.prompt, self.num_tokens), self.num_tokens)

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.instance_id = headers.get(b"x-tandem-decode-instance", b"").decode()
        super().on_head(status, headers)

    def on_output(self, chunk: Chunk) -> None:
        self.text += "".join(choice.text or "" for choice in chunk.choices)
        self.on_text()


class StreamMaker:
    """A maker of streams with prompts of their own, and with the text of their tokens."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
        self._texts = DetokenizerFactory(Codec(tokenizer))

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
        self._client = OpenAIClient(url)
        self._num_waited_for = len(self.streams)
        self._num_pieces = num_pieces

    async def run(self) -> None:
        """Send all, and return when all are over, failed or not."""
        try:
            await asyncio.gather(*(self._read(stream) for stream in self.streams))
        finally:
            self._client.close()

    async def _read(self, stream: Stream) -> None:
        times_s = stream.record.output_times_s
        stream.on_text = lambda: self._count() if len(times_s) == self._num_pieces else None
        await self._client.send(stream.request(), stream.record, 0.0, stream)
        if len(times_s) < self._num_pieces:
            self._count()

    def _count(self) -> None:
        self._num_waited_for -= 1
        if self._num_waited_for == 0:
            self.well_begun.set()
