"""When a prompt's first token would come at a worker, and whom that would delay. Pure.

Times come from the step costs that each worker learns and reports: a step with decodes takes
`c + n * per_decode + context * per_context`, prompts add `c + tokens * per_token` and, for each
token, its position. Prompts are computed in order of arrival; beside decodes a step holds as many
prompt tokens as keep it under the worker's longest step.
"""

import math
from dataclasses import dataclass

from tandem.runtime.messages import LoadReport, StepCosts

PLANNED_SHARE = 0.9  # of the longest step, as the scheduler plans it
FLOOR_TOKENS = 16  # of prompts in a step, however long its decodes take


@dataclass(frozen=True, slots=True)
class PlaceLoad:
    """The load of a worker, as far as it delays a prompt that comes now."""

    costs: StepCosts
    num_decodes: int = 0
    decode_context: int = 0  # tokens
    num_waiting_tokens: int = 0  # of prompts that come first

    @staticmethod
    def of(report: LoadReport) -> "PlaceLoad | None":
        """Return the load of a report, or None from a worker that has learned no cost yet."""
        if report.costs is None:
            return None
        return PlaceLoad(
            report.costs, report.num_decodes, report.decode_context, report.num_waiting_tokens
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """The expected seconds of one prompt at one place."""

    wait_s: float  # until its first step
    compute_s: float  # from there to its first token
    transfer_s: float = 0.0  # until its KV is proven at another worker, waits for messages included
    num_delayed: int = 0  # running answers, each of which gets its tokens `compute_s` later
    step_s: float = 0.0  # the longest that these answers wait for a token meanwhile

    @property
    def first_token_s(self) -> float:
        return self.wait_s + self.compute_s + self.transfer_s

    @property
    def cost_s(self) -> float:
        """The delay of all answers together: this one's first token, and the others' next ones."""
        return self.first_token_s + self.num_delayed * self.compute_s


def predict(
    load: PlaceLoad, num_uncached: int, num_cached: int = 0, transfer_s: float = 0.0
) -> Prediction:
    """Return what a prompt of `num_uncached` tokens behind `num_cached` would cost at a worker."""
    costs = load.costs
    per_step_s, per_token_s, per_position_s = costs.prompt_s
    decode_s = _decode_s(load)
    tokens_s = num_uncached * (per_token_s + per_position_s * (num_cached + num_uncached / 2))
    room = _room(costs, decode_s) if load.num_decodes else costs.max_tokens
    overhead_s = per_step_s + decode_s  # of each step
    compute_s = tokens_s + math.ceil(num_uncached / room) * overhead_s
    waiting = load.num_waiting_tokens
    wait_s = waiting * per_token_s + math.ceil(waiting / room) * overhead_s
    step_s = min(compute_s, max(costs.max_step_s, decode_s)) if load.num_decodes else 0.0
    return Prediction(wait_s, compute_s, transfer_s, load.num_decodes, step_s)


def _decode_s(load: PlaceLoad) -> float:
    if load.num_decodes == 0:
        return 0.0
    per_step_s, per_decode_s, per_context_s = load.costs.decode_s
    return per_step_s + load.num_decodes * per_decode_s + load.decode_context * per_context_s


def _room(costs: StepCosts, decode_s: float) -> int:
    """Return the prompt tokens of a step with decodes that take `decode_s`."""
    per_step_s, per_token_s, _ = costs.prompt_s
    left_s = PLANNED_SHARE * costs.max_step_s - decode_s - per_step_s
    fitting = left_s / per_token_s if per_token_s > 0 else math.inf
    return int(min(max(fitting, FLOOR_TOKENS), costs.max_tokens_beside, costs.max_tokens))
