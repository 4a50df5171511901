"""When a prompt's first token would come at a worker, and whom that would delay. Pure.

Times come from the step costs that each worker learns and reports: a step with decodes takes
`c + n * per_decode + context * per_context`, prompts add `c + tokens * per_token` and, for each
token, its position, less what is hidden in a step with both; no step with prompts is shorter than
its launches. Prompts are computed in order of arrival; beside decodes a step holds as many prompt
tokens as keep it under the worker's longest step. The formulas of a `Pace` hold for one worker, in
numbers, and for many at once, in arrays.
"""

import math
from typing import Generic, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from tandem.runtime.wire.cluster_messages import LoadReport, StepCosts

Floats = NDArray[np.float64]
Real = TypeVar("Real", float, Floats)

ANSWER_WEIGHT = 0.5  # of the delay of a running answer, beside that of a first token
SURE_SHARE = 0.7  # of the target of a first token: other prompts may come first
PLANNED_SHARE = 0.9  # of the longest step, as the scheduler plans it
FLOOR_TOKENS = 16  # of prompts in a step, however long its decodes take
SHARE_TRIED = 0.02  # of prompts, at an idle worker whose learned costs may be old
SHARE_UNBEARABLE = 0.1  # of these, at one that seems slower than MAX_SLOWNESS for the prompt
MAX_SLOWNESS = 4.0  # times the fastest of several workers, that any of them counts as
_TINY_S = 1e-12
_NOMINAL_TOKENS, _NOMINAL_DECODES, _NOMINAL_CONTEXT = 1024, 16, 16_384


class PlaceLoad(Struct, gc=False):
    """The load of a worker, as far as it delays a prompt that comes now."""

    costs: StepCosts
    num_decodes: int = 0
    decode_context: int = 0  # tokens
    num_waiting_tokens: int = 0  # of prompts that come first
    instance_id: str = ""  # of the worker; empty: this one
    num_own_tokens: int = 0  # of num_waiting_tokens: of prompts that the worker answers itself
    waiting_context: float = 0.0  # the positions of num_waiting_tokens, summed
    num_following_tokens: int = 0  # of prompts that have come by now and are computed after it

    def behind(self, num_tokens: int, context: float = 0.0) -> "PlaceLoad":
        """Return the load with so many tokens more that come first."""
        return replace(
            self,
            num_waiting_tokens=self.num_waiting_tokens + num_tokens,
            waiting_context=self.waiting_context + context,
        )

    @staticmethod
    def of(report: LoadReport) -> "PlaceLoad | None":
        """Return the load of a report, or None from a worker that has learned no cost yet."""
        if report.costs is None:
            return None
        return PlaceLoad(
            report.costs,
            report.num_decodes,
            report.decode_context,
            report.num_waiting_tokens,
            report.instance_id,
            report.num_own_prompt_tokens,
            report.waiting_context,
        )


class Pace(Struct, Generic[Real], frozen=True, gc=False):
    """The pace at which a worker computes prompts beside its running answers."""

    per_step_s: Real  # of a step with prompts
    per_token_s: Real
    per_position_s: Real
    decode_s: Real  # of the decodes in each step
    num_step_tokens: Real  # of prompts, in a step
    waiting_tokens_s: Real  # of prompts that come first
    num_waiting_steps: Real  # that hold these
    answers_weight: Real  # of the running answers together, beside a first token
    overhead_s: Real  # of each step: its constant, and its decodes
    floor_s: Real  # of each step, however few its tokens
    wait_s: Real  # until the prompts that come first are computed

    @staticmethod
    def of(load: PlaceLoad) -> "Pace[float]":
        """Return the pace of one worker."""
        costs = load.costs
        decode_s = decode_step_s(costs, load.num_decodes, load.decode_context)
        room = _room(costs, load.num_decodes, decode_s) if load.num_decodes else costs.max_tokens
        _, per_token_s, per_position_s = costs.prompt_s
        waiting_s = load.num_waiting_tokens * per_token_s + load.waiting_context * per_position_s
        num_steps = math.ceil(load.num_waiting_tokens / room)
        overhead_s = costs.prompt_s[0] + decode_s
        if load.num_decodes:
            overhead_s -= _hidden_s(costs)
        wait_s = max(waiting_s + num_steps * overhead_s, num_steps * costs.prompt_floor_s)
        return Pace(
            *costs.prompt_s, decode_s, room, waiting_s, num_steps,
            answers_weight(costs, load.num_decodes, decode_s), overhead_s, costs.prompt_floor_s,
            wait_s,
        )  # fmt: skip

    def compute_s(self, num_uncached: Real | float, num_cached: Real | float) -> Real:
        """Return the seconds from the first step of a prompt, after `wait_s`, to its first token.

        The prompt has `num_uncached` tokens behind `num_cached`.
        """
        per_token_s = self.per_token_s + self.per_position_s * (num_cached + num_uncached / 2)
        num_steps = _ceil(num_uncached / self.num_step_tokens)
        seconds = num_uncached * per_token_s + num_steps * self.overhead_s
        return _longer(seconds, num_steps * self.floor_s)


def _ceil(number: Real) -> Real:
    return np.ceil(number) if isinstance(number, np.ndarray) else float(math.ceil(number))


def _longer(first_s: Real, second_s: Real) -> Real:
    if isinstance(first_s, np.ndarray):
        return np.maximum(first_s, second_s)
    return max(first_s, second_s)


def delay_s(first_token_s: Real, compute_s: Real, answers_weight: Real) -> Real:
    """Return the delay of all answers together: of a new one's first token, and of the others."""
    return first_token_s + answers_weight * compute_s


def answers_weight(costs: StepCosts, num_decodes: int, decode_s: float) -> float:
    """Return the weight of running answers, whose tokens come later beside a prompt.

    With a target between tokens they count nothing as long as steps with prompts keep it: their
    scheduler sees to that. Otherwise each counts ANSWER_WEIGHT: with their whole delay long prompts
    would queue at the worker with the fewest answers for longer than these are worth.
    """
    is_in_time = costs.has_target and max(decode_s, costs.prompt_floor_s) <= costs.max_step_s
    return 0.0 if is_in_time else ANSWER_WEIGHT * num_decodes


def nominal_s(costs: StepCosts) -> tuple[float, float]:
    """Return the seconds of a typical prompt and of a typical step of decodes, to compare costs."""
    prompt_s = Pace.of(PlaceLoad(costs)).compute_s(_NOMINAL_TOKENS, 0.0)
    return prompt_s, decode_step_s(costs, _NOMINAL_DECODES, _NOMINAL_CONTEXT)


def bounding_arrays(prompt_s: Floats, decode_s: Floats) -> tuple[Floats, Floats] | None:
    """Return the factors by which none is slower than MAX_SLOWNESS times the fastest; None: all 1.

    `prompt_s` and `decode_s` are the nominal seconds of alike workers. A worker whose costs were
    learned in a bad moment gets prompts in spite of them, and learns them anew.
    """
    if _is_bounded(prompt_s) and _is_bounded(decode_s):
        return None
    return _factors(prompt_s), _factors(decode_s)


def scaled(pace: Pace[Real], by_prompts: Real, by_decodes: Real) -> Pace[Real]:
    """Return the pace with other seconds of prompts and of decodes, by these factors."""
    per_step_s, decode_s = pace.per_step_s * by_prompts, pace.decode_s * by_decodes
    waiting_tokens_s = pace.waiting_tokens_s * by_prompts
    shorter_s = pace.per_step_s - per_step_s + pace.decode_s - decode_s
    overhead_s = np.maximum(pace.overhead_s - shorter_s, 0.0)
    floor_s, num_steps = pace.floor_s * by_prompts, pace.num_waiting_steps
    return replace(
        pace,
        per_step_s=per_step_s,
        per_token_s=pace.per_token_s * by_prompts,
        per_position_s=pace.per_position_s * by_prompts,
        waiting_tokens_s=waiting_tokens_s,
        decode_s=decode_s,
        overhead_s=overhead_s,
        floor_s=floor_s,
        wait_s=_longer(waiting_tokens_s + num_steps * overhead_s, num_steps * floor_s),
    )


def _is_bounded(seconds: Floats) -> bool:
    return bool(seconds.max() <= MAX_SLOWNESS * seconds.min())


def _factors(seconds: Floats) -> Floats:
    """Return the factors that keep all `seconds` within the bound; zeros are not learned yet."""
    longest_s = MAX_SLOWNESS * seconds.min(initial=math.inf, where=seconds > 0)
    factors: Floats = np.minimum(1.0, longest_s / np.maximum(seconds, _TINY_S))
    return factors


class Prediction(Struct, frozen=True, gc=False):
    """The expected seconds of one prompt at one place."""

    wait_s: float  # until its first step
    compute_s: float  # from there to its first token
    transfer_s: float = 0.0  # until its KV is proven at another worker, waits for messages included
    num_delayed: int = 0  # running answers, each of which gets its tokens `compute_s` later
    answers_weight: float = 0.0  # of these together, beside a first token
    step_s: float = 0.0  # the longest that these answers wait for a token meanwhile
    instance_id: str = ""  # as in its PlaceLoad
    shared_s: float = 0.0  # by which the prompts that follow it lengthen its last step; not counted

    @property
    def first_token_s(self) -> float:
        return self.wait_s + self.compute_s + self.transfer_s

    @property
    def cost_s(self) -> float:
        """The delay of all answers together: this one's first token, and the others' next ones."""
        return delay_s(self.first_token_s, self.compute_s, self.answers_weight)


def predict(
    load: PlaceLoad, num_uncached: int, num_cached: int = 0, transfer_s: float = 0.0
) -> Prediction:
    """Return what a prompt of `num_uncached` tokens behind `num_cached` would cost at a worker."""
    pace = Pace.of(load)
    compute_s = pace.compute_s(num_uncached, num_cached)
    longest_s = max(load.costs.max_step_s, pace.decode_s, pace.floor_s)
    step_s = min(compute_s, longest_s) if load.num_decodes else 0.0
    num_following = load.num_following_tokens
    return Prediction(
        pace.wait_s,
        compute_s,
        transfer_s,
        load.num_decodes,
        pace.answers_weight,
        step_s,
        load.instance_id,
        _shared_s(pace, load.num_waiting_tokens + num_uncached, num_following)
        if num_following
        else 0.0,
    )


def _shared_s(pace: Pace[float], num_tokens: int, num_following: int) -> float:
    """Return the seconds that `num_following` tokens add to the last step of `num_tokens`.

    As many as the step has room for are computed with it, and a first token comes when it ends.
    """
    left = -num_tokens % pace.num_step_tokens
    last_s = pace.overhead_s + (pace.num_step_tokens - left) * pace.per_token_s
    added_s = min(left, num_following) * pace.per_token_s
    return max(0.0, min(added_s, last_s + added_s - pace.floor_s))


def share_left(costs: StepCosts, decodes_s: float) -> float:
    """Return the share of a worker's time that prompts get beside decodes of `decodes_s`."""
    if decodes_s == 0.0:
        return 1.0
    left_s = _planned_s(costs) - decodes_s - costs.prompt_s[0] + _hidden_s(costs)
    return max(0.0, left_s / max(costs.max_step_s, costs.prompt_floor_s, _TINY_S))


def decode_step_s(costs: StepCosts, num_decodes: int, context: int) -> float:
    """Return the seconds of a step of decodes with `context` tokens together."""
    if num_decodes == 0:
        return 0.0
    per_step_s, per_decode_s, per_context_s = costs.decode_s
    return per_step_s + num_decodes * per_decode_s + context * per_context_s


def _hidden_s(costs: StepCosts) -> float:
    """Return the seconds of a step with decodes that are hidden beside many prompt tokens."""
    return costs.hidden_share * costs.decode_s[0]


def _planned_s(costs: StepCosts) -> float:
    """Return the seconds of a step with decodes and prompts, as the scheduler fills it."""
    return max(PLANNED_SHARE * costs.max_step_s, costs.prompt_floor_s)


def _room(costs: StepCosts, num_decodes: int, decode_s: float) -> int:
    """Return the prompt tokens of a step with decodes that take `decode_s`."""
    per_step_s, per_token_s, _ = costs.prompt_s
    left_s = _planned_s(costs) - decode_s - per_step_s + _hidden_s(costs)
    fitting = left_s / per_token_s if per_token_s > 0 else math.inf
    tile, num_free = costs.tile_tokens, -num_decodes % costs.tile_tokens
    num_tokens = int(min(max(fitting, FLOOR_TOKENS), costs.max_tokens_beside, costs.max_tokens))
    if tile > 1:
        num_tokens -= num_decodes  # whose products share the tiles
    num_tiles = max((num_tokens - num_free) // tile, -((num_free - FLOOR_TOKENS) // tile), 0)
    return num_free + num_tiles * tile
