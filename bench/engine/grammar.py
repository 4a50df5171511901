"""The time that grammars add to a step: answers of the bundled model, free and under a schema.

python -m tandem.bench.engine.grammar
"""

import json
import sys
import time
from collections.abc import Sequence as Arguments
from dataclasses import dataclass
from statistics import median

from tandem.bench.report.figures import percentile
from tandem.bench.report.options import option, parse
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Sequence
from tandem.grammar.compiled import compile_source, load_tokenizer
from tandem.grammar.matcher import GrammarMatcher, MaskThreads
from tandem.grammar.source import matcher_source
from tandem.models.paths import BUNDLED_MODEL
from tandem.runtime.messages import Grammar, SamplingParams, StopConditions

MODULE = "tandem.bench.engine.grammar"
PROMPT_TOKENS, WARM_UP_STEPS = 60, 20
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "inner": {
            "type": "object",
            "properties": {
                "note": {"type": "string", "maxLength": 80},
                "is_new": {"type": "boolean"},
            },
            "required": ["note", "is_new"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "count", "tags", "inner"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 500}  # none of its answers ends in a round


@dataclass(frozen=True, slots=True)
class Options:
    """Time steps of free answers and of answers under a schema, on one thread of a CPU."""

    rounds: int = option(9, "in each of which both take a turn", least=1)
    steps: int = option(200, "of each in a round", least=2)
    answers: int = option(8, "generated together", least=1)


@dataclass(slots=True)
class Steps:
    """The steps of one turn."""

    times_us: list[float]
    num_tokens: int


class Bench:
    """One model, whose answers follow a grammar or do not."""

    def __init__(self) -> None:
        model = str(BUNDLED_MODEL)
        self._config = EngineConfig(model=model, device="cpu", threads=1, num_blocks=2048)
        self._runner = ModelRunner(self._config)
        model_config = self._runner.model_config
        self._vocab_size = model_config.vocab_size
        path = BUNDLED_MODEL / "tokenizer.json"
        tokenizer = load_tokenizer(path, self._vocab_size, model_config.eos_token_ids)
        self._grammar = Grammar("json_schema", json.dumps(SCHEMA))
        self._root = compile_source(
            tokenizer, self._grammar, matcher_source(self._grammar, tokenizer)
        )
        self._threads = MaskThreads()

    def run(self, num_answers: int, num_steps: int, *, is_free: bool) -> Steps:
        """Return `num_steps` steps in which each answer gets at least one token."""
        engine = Engine(self._config, self._runner)
        for index in range(num_answers):
            engine.add(self._sequence(index, engine.max_model_len, is_free=is_free))
        for _ in range(WARM_UP_STEPS):
            engine.step()
        steps = Steps([], 0)
        for _ in range(num_steps):
            started = time.perf_counter()
            outputs = engine.step()
            steps.times_us.append((time.perf_counter() - started) * 1e6)
            assert all(output.finish_reason is None for output in outputs)
            steps.num_tokens += sum(len(output.token_ids) for output in outputs)
        return steps

    def _sequence(self, index: int, max_model_len: int, *, is_free: bool) -> Sequence:
        prompt = [300 + (37 * index + 11 * i) % 1000 for i in range(PROMPT_TOKENS)]
        stop = StopConditions(max_tokens=max_model_len - PROMPT_TOKENS, ignore_eos=True)
        sampling = SamplingParams(temperature=1.0, seed=index)
        seq = Sequence(f"r{index}", prompt, PROMPT_TOKENS, sampling, stop)
        if not is_free:
            root = self._root.deep_copy()
            seq.matcher = GrammarMatcher(root, self._grammar, self._vocab_size, self._threads)
            seq.matcher.begin([])
        return seq


def main(arguments: Arguments[str] | None = None) -> int:
    """Print the time of a step and the time that the grammars add, medians of the rounds."""
    options = parse(Options, MODULE, arguments)
    bench = Bench()
    found: dict[bool, list[Steps]] = {True: [], False: []}
    for index in range(1 + options.rounds):
        for is_free, rounds in found.items():
            steps = bench.run(options.answers, options.steps, is_free=is_free)
            if index:  # the first warms up
                rounds.append(steps)
    for name, fraction in (("p50", 0.5), ("p99", 0.99)):
        free, bound = ([percentile(s.times_us, fraction) for s in found[i]] for i in (True, False))
        added = median(theirs - ours for ours, theirs in zip(free, bound, strict=True))
        print(f"{name}: {median(free):.0f} us free, {median(bound):.0f} bound, {added:+.0f} added")
    num_tokens = sum(steps.num_tokens for steps in found[False])
    num_steps = options.rounds * options.steps
    print(f"tokens of an answer in a step: {num_tokens / num_steps / options.answers:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
