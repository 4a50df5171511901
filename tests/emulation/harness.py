"""An engine over an emulated device that is so fast that tests need not wait for it."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml

from tandem.bench.stack.judge import true_answer
from tandem.emulation.runner import EmulatedRunner
from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.schedule.sequence import Sequence
from tandem.models.paths import BUNDLED_MODEL
from tandem.runtime.wire.messages import SamplingParams, StopConditions

VOCAB_SIZE, ENDS = 2048, (0, 2)  # of the bundled model
CHOICES = np.array([token_id for token_id in range(VOCAB_SIZE) if token_id not in ENDS])
FAST = """\
step_s: 1e-6
weights_s: 1e-6
token_s: 1e-9
position_s: 0
context_s: 0
row_s: 0
kv_bytes_per_token: 131072
kv_tokens: 4096
link_bytes_per_s: 1e13
link_latency_s: 1e-6
max_position_embeddings: 4096
"""


def fast_profile(folder: Path, **changes: object) -> str:
    """Write a profile with `changes`; return its name."""
    path = folder / "fast.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(FAST) | changes))
    return str(path)


def is_true(tokens: list[int], num_prompt: int, seed: int, block_size: int) -> bool:
    """Return True if each token of an answer is the one that its context gives."""
    return true_answer(tokens, num_prompt, seed, CHOICES, block_size) == tokens[num_prompt:]


@dataclass
class EmulatedEngine:
    """An engine, and the answers that it has given."""

    profile: str
    config: dict[str, object] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    seqs: dict[str, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = {"model": str(BUNDLED_MODEL), "emulate": self.profile, "block_size": 16}
        config = EngineConfig.model_validate(settings | self.config)
        self.runner = EmulatedRunner(config)
        self.engine = Engine(config, self.runner)

    def add(
        self, name: str, prompt: list[int], num_tokens: int, sampling: SamplingParams
    ) -> Sequence:
        seq = Sequence(name, list(prompt), len(prompt), sampling, StopConditions(num_tokens))
        self.seqs[name], self.answers[name] = seq, []
        self.engine.add(seq)
        return seq

    def step(self) -> None:
        self.engine.launch()
        for output in self.engine.collect():
            assert output.error is None, output.error
            self.answers[output.request_id] += output.token_ids
        self.engine.check_invariants()

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def wrong(self) -> list[str]:
        """Return the names of the answers that are not true."""
        return [
            name
            for name, seq in self.seqs.items()
            if not is_true(
                seq.token_ids[: seq.num_prompt_tokens] + self.answers[name],
                seq.num_prompt_tokens,
                seq.sampling.seed if seq.sampling.temperature else 0,
                self.engine.block_pool.block_size,
            )
        ]


def random_prompts(count: int, seed: int, longest: int = 900) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(3, VOCAB_SIZE), k=rng.randint(1, longest)) for _ in range(count)]
