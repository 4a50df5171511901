"""Traces as a workload: the same arrivals, lengths and, where they have it, prefix sharing."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from tandem.bench.load.trace_formats import TraceEntry, entries_in
from tandem.bench.load.workload import InputFormat, PromptSpec, Seeds, described, text_of, token_ids
from tandem.runtime.errors import ConfigError

TRACE_BLOCK_TOKENS = 512  # of one hash id of a Mooncake trace


def read_trace(path: Path, limit: int | None = None) -> tuple[TraceEntry, ...]:
    """Return the first `limit` entries, in order of time. Raises ConfigError with the line."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            entries = list(islice(entries_in(file, str(path)), limit))
    except OSError as exc:
        raise ConfigError(f"trace {path}: {exc}") from exc
    if not entries:
        raise ConfigError(f"trace {path} has no requests")
    return tuple(sorted(entries, key=lambda entry: entry.timestamp))


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """A trace replayed `time_scale` times as fast, each hash id as `block_tokens` tokens.

    `block_tokens` below 512 shrinks every prompt in proportion and keeps the sharing exact;
    the caps cut what is left to its first tokens.
    """

    path: str
    entries: tuple[TraceEntry, ...]
    time_scale: float = 1.0
    block_tokens: int = TRACE_BLOCK_TOKENS
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    vocab_size: int = 256
    input_format: InputFormat = "tokens"

    def __post_init__(self) -> None:
        if not self.time_scale > 0:
            raise ConfigError(f"the time scale must be above 0, not {self.time_scale:g}")
        if not 1 <= self.block_tokens <= TRACE_BLOCK_TOKENS:
            raise ConfigError(f"tokens per hash id must be 1 to {TRACE_BLOCK_TOKENS}")

    def prompts(self, seeds: Seeds) -> Iterator[PromptSpec]:
        @lru_cache(maxsize=4096)
        def block(hash_id: int) -> list[int]:
            return token_ids(f"{seeds.content}/block/{hash_id}", self.block_tokens, self.vocab_size)

        start_ms = self.entries[0].timestamp
        for index, entry in enumerate(self.entries):
            num_input = self.input_tokens(entry)
            ids: list[int] = []
            for hash_id in entry.hash_ids:
                if len(ids) >= num_input:
                    break
                ids += block(hash_id)
            missing = num_input - len(ids)
            if missing > 0:
                ids += token_ids(f"{seeds.content}/tail/{index}", missing, self.vocab_size)
            del ids[num_input:]
            yield PromptSpec(
                ids if self.input_format == "tokens" else text_of(ids),
                self.output_tokens(entry),
                (entry.timestamp - start_ms) / 1e3 / self.time_scale,
            )

    def input_tokens(self, entry: TraceEntry) -> int:
        """Return the prompt length that is sent for an entry."""
        scaled = max(1, round(entry.input_length * self.block_tokens / TRACE_BLOCK_TOKENS))
        return min(scaled, self.max_input_tokens or scaled)

    def output_tokens(self, entry: TraceEntry) -> int:
        """Return the answer's length that is asked for."""
        return min(entry.output_length, self.max_output_tokens or entry.output_length)

    def require_fit(self, context_tokens: int, num_requests: int | None) -> None:
        """Raise ConfigError naming the options when a request exceeds the model's context."""
        lengths = [
            (self.input_tokens(entry), self.output_tokens(entry))
            for entry in self.entries[:num_requests]
        ]
        sizes = [num_input + num_output for num_input, num_output in lengths]
        num_beyond = sum(size > context_tokens for size in sizes)
        if not num_beyond:
            return
        longest_input, longest_output = (max(column) for column in zip(*lengths, strict=True))
        most_input = max(1, context_tokens - longest_output)
        shrunk = max(1, self.block_tokens * most_input // longest_input)
        raise ConfigError(
            f"trace {self.path}: {num_beyond} of {len(sizes)} requests exceed the model's context "
            f"of {context_tokens} tokens, the largest has {max(sizes)}: shrink all prompts with "
            f"--trace-block-tokens {shrunk}, or cut them with --max-input-tokens {most_input}; "
            "--max-output-tokens cuts answers"
        )

    def describe(self) -> dict[str, Any]:
        cap, share = self.max_input_tokens, self.block_tokens / TRACE_BLOCK_TOKENS
        num_cut = sum(cap is not None and each.input_length * share > cap for each in self.entries)
        return described(self, "trace", num_requests=len(self.entries), num_cut_prompts=num_cut)
