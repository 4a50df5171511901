"""The loads of a comparison and the figures of one engine's turn. Unequal work is an error."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from tandem.bench.client.openai import PreparedRequest
from tandem.bench.client.record import RequestRecord
from tandem.bench.engines.process import EngineProcess
from tandem.bench.load.load import LoadPlan, LoadRun
from tandem.bench.load.metrics import Summary, summarize
from tandem.bench.load.workload import Seeds, SyntheticWorkload, text_of, token_ids
from tandem.runtime.errors import ConfigError

NUM_TRIES = 8
WARM_UP_TOKENS = 4  # of an answer before each turn, which has cold memory and caches
WORDS = 1 << 20  # that prompts are drawn from


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in a closed loop."""

    name: str
    concurrency: int
    num_requests: int
    workload: SyntheticWorkload  # of which the lengths count

    def lengths(self, seed: int) -> list[tuple[int, int]]:
        """Return the tokens in and out of each request: the same for every engine of a round."""
        specs = itertools.islice(self.workload.prompts(Seeds(seed, "")), self.num_requests)
        return [(len(spec.prompt), spec.num_output_tokens or 1) for spec in specs]


class Prompts:
    """Text of an exact number of tokens, as text and as those tokens."""

    def __init__(self, model: Path) -> None:
        """Read tokenizer.json of the folder `model`. Raises ConfigError when there is none."""
        path = model / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{model} has no tokenizer.json, so no prompt's length is known")
        self._tokenizer = Tokenizer.from_file(str(path))

    def make(self, key: str, num_tokens: int) -> tuple[str, list[int]]:
        """Return a prompt, a function of `key`. Raises ConfigError if no text has that length."""
        for index in range(NUM_TRIES):
            words = text_of(token_ids(f"{key}/{index}", num_tokens, WORDS))
            ids = self._encode(words)[:num_tokens]
            text = self._tokenizer.decode(ids)
            if len(ids) == num_tokens and self._encode(text) == ids:
                return text, ids
        raise ConfigError(f"this tokenizer makes no text that is exactly {num_tokens} tokens")

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True, slots=True)
class Turn:
    """One engine under one load, once."""

    summary: Summary
    cpu_s: float  # of all its processes

    def line(self) -> str:
        """Return the turn as a line of progress."""
        latencies = self.summary.latencies_ms
        return (
            f"TTFT {latencies['ttft'].p50:.0f} ms, ITL {latencies['tpot'].p50:.1f} ms, "
            f"{self.summary.output_token_throughput:.1f} tokens/s, CPU {self.cpu_s:.2f} s"
        )


async def take_turn(
    process: EngineProcess, load: Load, prompts: Prompts, content: str, seed: int
) -> Turn:
    """Send the load to a running engine; `content` makes its prompts differ from all others.

    Raises ServiceError when a request failed or was other work than asked for.
    """
    lengths = load.lengths(seed)
    requests = list(_requests(process, prompts, content, lengths))
    warm_up, _ = prompts.make(f"{content}/warm-up", load.workload.input_tokens)
    await process.ask(warm_up, WARM_UP_TOKENS)
    plan = LoadPlan(concurrency=load.concurrency, num_requests=load.num_requests)
    cpu_s = process.cpu_s()
    result = await LoadRun(process.client, iter(requests), plan).run()
    cpu_s = process.cpu_s() - cpu_s
    for record, (num_input, num_output) in zip(result.records, lengths, strict=True):
        if wrong := difference_of(record, num_input, num_output):
            raise process.error(wrong)
    return Turn(summarize(result.records, {}), cpu_s)


def difference_of(record: RequestRecord, num_input: int, num_output: int) -> str:
    """Return the difference from the work asked for, in tokens; empty without one."""
    if not record.succeeded:
        return f"failed a request: {record.error}: {record.error_message}"
    if record.num_output_tokens != num_output:
        return (
            f"answered with {record.num_output_tokens} tokens where {num_output} were asked for "
            f"(finish_reason: {record.finish_reason or 'none'})"
        )
    if record.has_usage and record.num_input_tokens != num_input:
        return f"counted {record.num_input_tokens} tokens in a prompt of {num_input}"
    if record.num_cached_tokens:
        return f"had {record.num_cached_tokens} tokens of a new prompt in its prefix cache"
    return ""


def _requests(
    process: EngineProcess, prompts: Prompts, content: str, lengths: list[tuple[int, int]]
) -> Iterator[PreparedRequest]:
    for index, (num_input, num_output) in enumerate(lengths):
        text, ids = prompts.make(f"{content}/{index}", num_input)
        prompt = ids if process.engine.takes_token_ids else text
        yield PreparedRequest(process.body.encode(prompt, num_output), num_output)
