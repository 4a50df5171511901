"""The time that grammars add: answers of the bundled model, free and under two grammars.

The words have one token in a step, as free answers do. The schema forces some of its tokens, so
that its steps compute more tokens than free ones, and its answers get more.

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
GRAMMARS = {  # no answer ends in a round
    "words": Grammar("regex", "([A-Z]?[a-z]{1,12}[,.]? ){5000}"),
    "schema": Grammar("json_schema", json.dumps({"type": "array", "items": ITEM, "minItems": 500})),
}
FREE = "free"


@dataclass(frozen=True, slots=True)
class Options:
    """Time steps of free answers and of answers under a grammar, on one thread of a CPU."""

    rounds: int = option(9, "in each of which all take a turn", least=1)
    steps: int = option(200, "of each in a round", least=2)
    answers: int = option(8, "generated together", least=1)


@dataclass(slots=True)
class Steps:
    """The steps of one turn."""

    times_us: list[float]
    gaps_us: list[float]  # a token's share of its step; those of one answer and step come together


class Bench:
    """One model, whose answers follow a grammar or are free."""

    def __init__(self) -> None:
        model = str(BUNDLED_MODEL)
        self._config = EngineConfig(model=model, device="cpu", threads=1, num_blocks=2048)
        self._runner = ModelRunner(self._config)
        model_config = self._runner.model_config
        self._vocab_size = model_config.vocab_size
        path = BUNDLED_MODEL / "tokenizer.json"
        tokenizer = load_tokenizer(path, self._vocab_size, model_config.eos_token_ids)
        self._roots = {
            name: compile_source(tokenizer, grammar, matcher_source(grammar, tokenizer))
            for name, grammar in GRAMMARS.items()
        }
        self._threads = MaskThreads()

    def run(self, num_answers: int, num_steps: int, name: str) -> Steps:
        """Return `num_steps` steps of answers that each get a token in all of them."""
        engine = Engine(self._config, self._runner)
        for index in range(num_answers):
            engine.add(self._sequence(index, engine.max_model_len, name))
        for _ in range(WARM_UP_STEPS):
            engine.step()
        steps = Steps([], [])
        for _ in range(num_steps):
            started = time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - started
            assert all(output.finish_reason is None for output in outputs)
            steps.times_us.append(seconds * 1e6)
            for num_tokens in [len(output.token_ids) for output in outputs]:
                steps.gaps_us += [seconds * 1e6 / num_tokens] * num_tokens
        return steps

    def _sequence(self, index: int, max_model_len: int, name: str) -> Sequence:
        prompt = [300 + (37 * index + 11 * i) % 1000 for i in range(PROMPT_TOKENS)]
        stop = StopConditions(max_tokens=max_model_len - PROMPT_TOKENS, ignore_eos=name == FREE)
        sampling = SamplingParams(temperature=1.0, seed=index)
        seq = Sequence(f"r{index}", prompt, PROMPT_TOKENS, sampling, stop)
        if name != FREE:
            root, grammar = self._roots[name].deep_copy(), GRAMMARS[name]
            seq.matcher = GrammarMatcher(root, grammar, self._vocab_size, self._threads)
            seq.matcher.begin([])
        return seq


def main(arguments: Arguments[str] | None = None) -> int:
    """Print the times of a step and of a token, with the time that the grammars add to them."""
    options = parse(Options, MODULE, arguments)
    bench = Bench()
    found: dict[str, list[Steps]] = {name: [] for name in (FREE, *GRAMMARS)}
    for index in range(1 + options.rounds):
        for name, rounds in found.items():
            steps = bench.run(options.answers, options.steps, name)
            if index:  # the first warms up
                rounds.append(steps)
    for name in GRAMMARS:
        num_tokens = sum(len(steps.gaps_us) for steps in found[name])
        num_steps = options.rounds * options.steps
        print(
            f"{name}: {num_tokens / num_steps / options.answers:.2f} tokens of an answer in a step"
        )
        _print_added("step", *([steps.times_us for steps in found[each]] for each in (FREE, name)))
        _print_added("token", *([steps.gaps_us for steps in found[each]] for each in (FREE, name)))
    return 0


def _print_added(unit: str, free: list[list[float]], bound: list[list[float]]) -> None:
    """Print medians over the rounds, whose times these are in us."""
    for label, fraction in (("p50", 0.5), ("p99", 0.99)):
        ours, theirs = ([percentile(times, fraction) for times in each] for each in (free, bound))
        added = median(mine - free for free, mine in zip(ours, theirs, strict=True))
        print(
            f"  {unit} {label}: {median(ours):.0f} us free,"
            f" {median(theirs):.0f} bound, {added:+.0f} added"
        )


if __name__ == "__main__":
    sys.exit(main())
