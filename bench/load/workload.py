"""Prompts of synthetic lengths and from prompt files. Pure but for reading.

A workload's *shape* (lengths, order) follows `Seeds.shape`; the *content* of its prompts follows
`Seeds.content`, so that two runs can carry the same load without sharing a prefix cache.
"""

import dataclasses
import hashlib
import itertools
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from tandem.bench.client.wire import Prompt
from tandem.runtime.errors import ConfigError

InputFormat = Literal["tokens", "text"]


@dataclass(frozen=True, slots=True)
class Seeds:
    """The seeds of a run: lengths and arrivals depend on `shape`, prompts on `content`."""

    shape: int
    content: str


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """One request to send. `offset_s` is when a trace sent it, in seconds after the first."""

    prompt: Prompt
    num_output_tokens: int | None
    offset_s: float | None = None
    cache_salt: str = ""


class Workload(Protocol):
    """A source of prompts; the same seeds give the same prompts."""

    def prompts(self, seeds: Seeds) -> Iterator[PromptSpec]: ...

    def describe(self) -> dict[str, Any]: ...


def described(workload: Any, kind: str, **more: Any) -> dict[str, Any]:
    """Return a workload's fields, without its entries, as a document has them."""
    names = [each.name for each in dataclasses.fields(workload) if each.name != "entries"]
    return {"kind": kind, **{name: getattr(workload, name) for name in names}, **more}


def token_ids(key: str, num_tokens: int, vocab_size: int) -> list[int]:
    """Return `num_tokens` ids below `vocab_size`, a function of `key` alone (SHAKE-128)."""
    words = array("I")
    words.frombytes(hashlib.shake_128(key.encode()).digest(num_tokens * words.itemsize))
    return [word % vocab_size for word in words]


def text_of(ids: Sequence[int]) -> str:
    """Return a pronounceable word per id, for servers or endpoints that take no token ids."""
    return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in ids)


_SYLLABLES = [c + v for c in "bdfgklmnprst" for v in "aeiou"]
_WORDS = [first + second for first, second in itertools.product(_SYLLABLES, repeat=2)]


@dataclass(frozen=True, slots=True)
class SyntheticWorkload:
    """Random prompts of given lengths, a share of them common to all prompts of a run."""

    input_tokens: int
    output_tokens: int
    input_stddev: float = 0.0
    output_stddev: float = 0.0
    prefix_tokens: int = 0
    vocab_size: int = 256
    input_format: InputFormat = "tokens"

    def __post_init__(self) -> None:
        if self.input_tokens < 1 or self.output_tokens < 1:
            raise ConfigError("input and output lengths must be at least 1 token")
        if self.prefix_tokens >= self.input_tokens and self.prefix_tokens:
            raise ConfigError(
                f"the shared prefix ({self.prefix_tokens} tokens) must be shorter than the input "
                f"({self.input_tokens} tokens)"
            )
        if self.vocab_size < 1:
            raise ConfigError("the vocabulary size must be at least 1")

    def prompts(self, seeds: Seeds) -> Iterator[PromptSpec]:
        lengths = random.Random(f"lengths/{seeds.shape}")
        prefix = token_ids(f"{seeds.content}/prefix", self.prefix_tokens, self.vocab_size)
        for index in itertools.count():
            num_input = _draw(lengths, self.input_tokens, self.input_stddev, len(prefix) + 1)
            num_output = _draw(lengths, self.output_tokens, self.output_stddev, 1)
            own = token_ids(f"{seeds.content}/{index}", num_input - len(prefix), self.vocab_size)
            ids = prefix + own
            yield PromptSpec(ids if self.input_format == "tokens" else text_of(ids), num_output)

    def describe(self) -> dict[str, Any]:
        return described(self, "synthetic")


@dataclass(frozen=True, slots=True)
class FileWorkload:
    """The prompts of a file as they are, in order, over and over.

    `is_salted` sends a cache_salt with each, so that a second run finds no prefix of the first.
    """

    path: str
    entries: tuple[Mapping[str, Any], ...]  # prompt | messages, optional output_tokens
    output_tokens: int | None
    is_salted: bool

    def prompts(self, seeds: Seeds) -> Iterator[PromptSpec]:
        digest = hashlib.blake2b(seeds.content.encode(), digest_size=8).hexdigest()
        cache_salt = digest if self.is_salted else ""
        for entry in itertools.cycle(self.entries):
            prompt = entry.get("messages") or entry["prompt"]
            num_output = entry.get("output_tokens", self.output_tokens)
            yield PromptSpec(prompt, num_output, cache_salt=cache_salt)

    def describe(self) -> dict[str, Any]:
        return described(self, "prompt file", num_prompts=len(self.entries))


def read_prompt_file(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the entries of a prompt file: JSON objects per line, or plain text lines.

    An object has `prompt` (text or token ids) or `messages`, and may have `output_tokens`.
    Raises ConfigError naming the file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"prompt file {path}: {exc}") from exc
    entries = tuple(
        _entry(line, path, number) for number, line in enumerate(lines, 1) if line.strip()
    )
    if not entries:
        raise ConfigError(f"prompt file {path} has no prompts")
    return entries


def _entry(line: str, path: Path, number: int) -> Mapping[str, Any]:
    if not line.lstrip().startswith("{"):
        return {"prompt": line}
    try:
        entry = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{path}:{number}: not JSON: {exc}") from exc
    if not entry.get("prompt") and not entry.get("messages"):
        raise ConfigError(f'{path}:{number}: expected a "prompt" or "messages"')
    return entry


def _draw(draws: random.Random, mean: int, stddev: float, least: int) -> int:
    return max(least, round(draws.gauss(mean, stddev))) if stddev > 0 else max(least, mean)
