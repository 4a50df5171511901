"""The costs of steps, learned from a few short prompts and answers before the first request.

A worker without them could be predicted by nobody: it would get no prompts, and learn no costs.
"""

import logging
import statistics
import time
from collections.abc import Sequence as SequenceOf

from tandem.engine.core.engine import Engine
from tandem.engine.schedule.sequence import Chunk, Sequence
from tandem.engine.schedule.step_cost import AT_FLOOR, StepCost, StepWork, work_of
from tandem.runtime.wire.cluster_messages import StepCosts
from tandem.runtime.wire.messages import SamplingParams, StopConditions

logger = logging.getLogger(__name__)

BUDGET_S = 0.4  # in which the lengths grow; a slow model takes one prompt and one answer
LENGTHS = (32, 128, 512, 2048)  # tokens of the prompts
NUM_ANSWERS = 8  # that run at once
NUM_TOKENS = 4  # of each answer
_GREEDY = SamplingParams(temperature=0.0)


def measure_costs(engine: Engine) -> None:
    """Teach `engine`, which has no work, what its steps cost. Leaves nothing in its KV pool.

    A model that fails is left to the first request, whose error says so.
    """
    scheduler, pool = engine.scheduler, engine.block_pool
    before, has_cache = scheduler.step_cost, pool.enable_prefix_cache
    max_step_s, tile, has_floor = before.max_step_s, before.tile_tokens, before.has_floor
    pool.enable_prefix_cache = False
    num_fitting = pool.num_blocks // pool.num_groups * pool.block_size // 2
    longest = min(engine.max_model_len - NUM_TOKENS, num_fitting)
    lengths = [length for length in LENGTHS if length <= longest] or [max(1, longest)]
    try:
        _run(engine, lengths[:1])  # not learned from: it loads what later steps find loaded
        scheduler.step_cost = apart = _MixedApart(max_step_s, tile, has_floor=has_floor)
        _measure(engine, lengths)
    finally:
        pool.enable_prefix_cache = has_cache
    costs = apart.as_reported(engine)
    if costs is None:
        scheduler.step_cost = StepCost(max_step_s, tile, has_floor=has_floor)
    else:
        scheduler.step_cost = StepCost.known(costs)
        scheduler.step_cost.is_guessed = apart.is_guessed


class _MixedApart(StepCost):
    """Learns from steps of prompts and from steps of decodes; keeps those of both apart."""

    def __init__(self, max_step_s: float, tile_tokens: int, *, has_floor: bool) -> None:
        super().__init__(max_step_s, tile_tokens, has_floor=has_floor)
        self._mixed: list[tuple[StepWork, float]] = []

    def observe(self, chunks: list[Chunk], seconds: float) -> None:
        work = work_of(chunks)
        if work.num_decodes and work.num_prompt_tokens:
            self._mixed.append((work, seconds))
        else:
            super().observe(chunks, seconds)

    def as_reported(self, engine: Engine) -> StepCosts | None:
        """Return what was learned, and the share that steps of both hid; None without prompts."""
        constant_s = self._decodes.weights[0]
        shares = []
        for work, seconds in self._mixed:
            prompts_s, smaller_s = self._prompts_s(work), min(constant_s, self._products_s(work))
            if smaller_s > 0 and seconds > AT_FLOOR * self.floor_s:
                hidden_s = self._decoding_s(work) + prompts_s - seconds
                shares.append(min(max(hidden_s / smaller_s, 0.0), 1.0))
        self.hidden_share = statistics.median(shares) if shares else 0.0
        return engine.load().costs


def _measure(engine: Engine, lengths: list[int]) -> None:
    began_s, longest = time.perf_counter(), lengths[0]
    for length in lengths:
        run_s, longest = _run(engine, [length], num_tokens=1), length
        left_s = BUDGET_S - (time.perf_counter() - began_s)
        if left_s < run_s * LENGTHS[1] / LENGTHS[0]:
            break
    num_answers = min(NUM_ANSWERS, engine.scheduler.max_num_seqs - 1)
    if num_answers > 1 and left_s > 0:
        # The prompt begins beside the answers, in steps that grow from few tokens on.
        _run(engine, [1] * num_answers, [longest])
    if not any(engine.scheduler.step_cost.decode_s):
        _run(engine, [1])


def _run(engine: Engine, *waves: SequenceOf[int], num_tokens: int = NUM_TOKENS) -> float:
    """Compute prompts of these lengths, each with a short answer; return the seconds.

    Those of a later wave come a step after the earlier ones.
    """
    began_s = time.perf_counter()
    for number, lengths in enumerate(waves):
        is_last = number + 1 == len(waves)
        stop = StopConditions(num_tokens if is_last else 4 * NUM_TOKENS, ignore_eos=True)
        for index, length in enumerate(lengths):
            name = f"measured {number}.{index}"
            engine.add(Sequence(name, [0] * length, length, _GREEDY, stop))
        _step(engine)
    while engine.has_work:
        _step(engine)
    return time.perf_counter() - began_s


def _step(engine: Engine) -> None:
    for output in engine.step():
        if output.error is not None:
            logger.warning("the costs of steps could not be measured: %s", output.error)
