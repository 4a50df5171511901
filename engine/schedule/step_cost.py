"""The duration of a step, learned from earlier steps, and the prompt tokens that fit into one.

The model is linear: the cost of decodes (a constant, each sequence, its context), and the further
cost of prompt tokens (a constant, each token, its context). A device that reads the weights while
it multiplies hides the smaller of the decodes' constant and the prompts' cost without that of their
context in a step with both: the share of it that is hidden is measured once. A GPU waits for the
launches of a step with prompts, which no graph replays: below that floor tokens cost nothing, and
steps there tell nothing of their cost. Pure.
"""

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.engine.config import DeviceKind, EngineConfig
from tandem.runtime.wire.cluster_messages import StepCosts, positions_of

if TYPE_CHECKING:
    from tandem.engine.schedule.sequence import Chunk

LONGEST_STEP_MS: dict[DeviceKind, float] = {"gpu": 50.0, "cpu": 250.0}
SAFETY = 0.9  # share of the longest step that is planned; the rest is for the model's errors
FLOOR_TOKENS = 16  # prompts advance by these, however long the decodes take
FIRST_TOKENS = 64  # beside decodes, before anything was measured
DECAY = 0.95  # weight of an observation after one more
SURPRISE = 0.15  # relative error of a prediction from which the past counts for little
DECAY_AT_A_SURPRISE = 0.6
AT_FLOOR = 1.25  # times the floor: steps up to there may have waited for their launches
FLOOR_GROWTH = 1.01  # by a step that only its launches bind: the floor is the shortest of the last
MOSTLY = 0.5  # of the products of prompts is hidden
RIDGE = 1e-4  # of the greatest sum of squares of a feature
OUTLIER = 4.0  # times the prediction, plus the longest step: longer times are cut to this
NUM_OBSERVED = 64  # first steps without prompts, that are all observed
DECODES_OBSERVED_EVERY = 8  # after these: they are many and alike
ENDLESS = 2**31  # tokens, where they cost nothing
# Features are counted in these, so that all are of the same magnitude.
DECODES, DECODE_CONTEXT, TOKENS, TOKEN_CONTEXT = 64, 65_536, 512, 2**20


def longest_step_s(config: EngineConfig, kind: DeviceKind) -> float:
    """Return the seconds that a step with decodes may take on a device of this kind."""
    return (config.max_step_ms or LONGEST_STEP_MS[kind]) / 1e3


@dataclass(slots=True)
class StepWork:
    """The work of a step. The context of a decode is its length, of a prompt token its position."""

    num_decodes: int = 0
    decode_context: int = 0
    num_prompt_tokens: int = 0
    prompt_context: float = 0.0

    def add_prompt(self, start: int, num_tokens: int) -> None:
        self.num_prompt_tokens += num_tokens
        self.prompt_context += positions_of(num_tokens, start)

    def decode_features(self) -> list[float]:
        return [1.0, self.num_decodes / DECODES, self.decode_context / DECODE_CONTEXT]

    def num_free(self, tile_tokens: int) -> int:
        """Return how many prompt tokens more the products of a step take at no cost."""
        return -(self.num_decodes + self.num_prompt_tokens) % tile_tokens

    def num_multiplied(self, tile_tokens: int) -> int:
        """Return the tokens that prompts have products computed for.

        Those of decodes share their tiles; without tiles each decode has a cost of its own.
        """
        if tile_tokens == 1:
            return self.num_prompt_tokens
        return self.num_decodes + self.num_prompt_tokens + self.num_free(tile_tokens)

    def prompt_features(self, tile_tokens: int) -> list[float]:
        num_multiplied = self.num_multiplied(tile_tokens)
        return [1.0, num_multiplied / TOKENS, self.prompt_context / TOKEN_CONTEXT]


def work_of(chunks: "list[Chunk]") -> StepWork:
    """Return the work of `chunks`. A chunk of one token counts as a decode."""
    work = StepWork()
    num_decodes = decode_context = 0  # locals: most chunks are decodes, and this is called per step
    for _, start, end, _ in chunks:
        if end - start == 1:
            num_decodes += 1
            decode_context += end
        else:
            work.add_prompt(start, end - start)
    work.num_decodes, work.decode_context = num_decodes, decode_context
    return work


class LinearCost:
    """Least squares with non-negative weights; old observations fade."""

    def __init__(self, num_features: int, slack_s: float) -> None:
        self._slack_s = slack_s
        self._gram = [[0.0] * num_features for _ in range(num_features)]
        self._moment = [0.0] * num_features
        self.weights = [0.0] * num_features

    def observe(self, features: list[float], seconds: float) -> None:
        """Learn from one step. Outliers are cut: a step may have compiled a kernel."""
        expected = self.predict(features)
        seconds = min(seconds, OUTLIER * expected + self._slack_s)
        is_surprise = abs(seconds - expected) > SURPRISE * expected
        decay = DECAY_AT_A_SURPRISE if is_surprise else DECAY
        for i, left in enumerate(features):
            row = zip(self._gram[i], features, strict=True)
            self._gram[i] = [decay * old + left * right for old, right in row]
            self._moment[i] = decay * self._moment[i] + left * seconds
        self.weights = _solve_non_negative(self._gram, self._moment, self.weights)

    def begin_with(self, weights: list[float]) -> None:
        """Start from `weights`, as if each feature had been observed once, alone."""
        for i, weight in enumerate(weights):
            self._gram[i][i], self._moment[i] = 1.0, weight
        self.weights = list(weights)

    def predict(self, features: list[float]) -> float:
        return math.fsum(map(operator.mul, self.weights, features))


class StepCost:
    """The number of prompt tokens that fit into a step with decodes of at most `max_step_s`."""

    def __init__(self, max_step_s: float, tile_tokens: int = 1, *, has_floor: bool = False) -> None:
        self.max_step_s = max_step_s
        self.tile_tokens = tile_tokens
        self.has_floor = has_floor
        self.floor_s = 0.0  # of a step with prompts; 0: not known, or there is none
        self.is_guessed = has_floor  # no prompt's step was longer than the floor so far
        self.has_target = False  # `max_step_s` is no longer than a target of the config
        # Of the config, for those who choose a worker:
        self.ttft_target_s: float | None = None
        self.longest_local = 0  # tokens of a prompt that is never computed elsewhere
        self._decodes = LinearCost(3, max_step_s)
        self._prompts = LinearCost(3, max_step_s)
        self.hidden_share = 0.0  # of the smaller part of a step with both, from 0 to 1
        # A step with so many kept the limit; up to twice that is tried.
        self._num_proven_tokens = FIRST_TOKENS // 2
        self._num_decode_steps = 0

    @classmethod
    def known(cls, costs: StepCosts) -> "StepCost":
        """Return a cost that begins with those that a worker reported."""
        cost = cls(costs.max_step_s, costs.tile_tokens)
        per_step, per_decode, per_context = costs.decode_s
        cost._decodes.begin_with([per_step, per_decode * DECODES, per_context * DECODE_CONTEXT])
        per_step, per_token, per_context = costs.prompt_s
        cost._prompts.begin_with([per_step, per_token * TOKENS, per_context * TOKEN_CONTEXT])
        cost.hidden_share = costs.hidden_share
        cost.has_floor, cost.floor_s = costs.prompt_floor_s > 0, costs.prompt_floor_s
        cost._num_proven_tokens = costs.max_tokens_beside
        return cost

    def aim(
        self,
        max_step_s: float,
        itl_target_ms: float | None,
        ttft_target_ms: float | None,
        longest_local: int = 0,
    ) -> None:
        """Set the longest step, no longer than the target of the time between tokens if given."""
        self.has_target = itl_target_ms is not None
        self.max_step_s = max_step_s
        if itl_target_ms is not None:
            self.max_step_s = min(max_step_s, itl_target_ms / 1e3)
        self.ttft_target_s = None if ttft_target_ms is None else ttft_target_ms / 1e3
        self.longest_local = longest_local

    def observe(self, chunks: "list[Chunk]", seconds: float) -> None:
        """Learn that a step of `chunks` took the device `seconds`."""
        _, start, end, _ = chunks[-1]
        if end - start == 1:
            self._num_decode_steps = number = self._num_decode_steps + 1
            if number > NUM_OBSERVED and number % DECODES_OBSERVED_EVERY:
                return
        work = work_of(chunks)
        if work.num_prompt_tokens == 0:
            self._decodes.observe(work.decode_features(), seconds)
            return
        is_at_floor = self._is_at_floor(seconds, work)
        if seconds <= self.max_step_s or is_at_floor:
            self._num_proven_tokens = max(self._num_proven_tokens, work.num_prompt_tokens)
        elif work.num_decodes:
            fitting = work.num_prompt_tokens * SAFETY * self.max_step_s / seconds
            self._num_proven_tokens = max(FLOOR_TOKENS // 2, int(fitting / 2))
        prompts_s = max(0.0, seconds - self._decoding_s(work) + self._hidden_s(work))
        if is_at_floor and 0 < self._prompts_s(work) <= prompts_s:
            return
        if self._is_hidden(work) and abs(seconds - self._predicted_s(work)) <= SURPRISE * seconds:
            return
        if self.is_guessed:
            self._prompts = LinearCost(3, self.max_step_s)
            if is_at_floor:  # a token takes no more than this
                num_multiplied = work.num_multiplied(self.tile_tokens)
                self._prompts.begin_with([0.0, prompts_s * TOKENS / num_multiplied, 0.0])
                return
            self.is_guessed = False
        self._prompts.observe(work.prompt_features(self.tile_tokens), prompts_s)

    def _is_at_floor(self, seconds: float, work: StepWork) -> bool:
        """Return whether a step with prompts was as short as its launches; learn the floor."""
        if not self.has_floor:
            return False
        if not self.floor_s or seconds < self.floor_s:
            self.floor_s = seconds
        elif self._predicted_s(work) <= self.floor_s:
            self.floor_s = min(seconds, FLOOR_GROWTH * self.floor_s)
        return seconds <= AT_FLOOR * self.floor_s

    def _predicted_s(self, work: StepWork) -> float:
        """Return the seconds of a step with prompts, were there no launches to wait for."""
        return self._decoding_s(work) + self._prompts_s(work) - self._hidden_s(work)

    def _hidden_s(self, work: StepWork) -> float:
        """Return the seconds of a step with decodes and prompts that neither adds to the other."""
        if not work.num_decodes:
            return 0.0
        return self.hidden_share * min(self._decodes.weights[0], self._products_s(work))

    def _is_hidden(self, work: StepWork) -> bool:
        """Return whether most of the products of prompts is hidden, so that a step tells little."""
        is_shorter = 0 < self._products_s(work) <= self._decodes.weights[0]
        return work.num_decodes > 0 and self.hidden_share >= MOSTLY and is_shorter

    def _products_s(self, work: StepWork) -> float:
        """Return the seconds of prompts in a step without those of their context."""
        constant, per_token, _ = self._prompts.weights
        return constant + per_token * work.num_multiplied(self.tile_tokens) / TOKENS

    def room(self, work: StepWork, start: int) -> int:
        """Return how many tokens from position `start` a step with `work` can take, 0 or more.

        The first prompt of a step gets FLOOR_TOKENS even where there is no room. All tokens of the
        step are a multiple of its tile, which costs no more.
        """
        constant, per_token, per_context = self._prompts.weights
        left_s = max(SAFETY * self.max_step_s, self.floor_s) - self._decoding_s(work) - constant
        left_s += self.hidden_share * self._decodes.weights[0]
        per_token, per_context = per_token / TOKENS, per_context / TOKEN_CONTEXT
        left_s -= work.num_prompt_tokens * per_token + work.prompt_context * per_context
        num_tokens = _largest(per_context / 2, per_token + start * per_context, left_s)
        if self.tile_tokens > 1:
            num_tokens -= work.num_decodes
        num_tokens = min(num_tokens, 2 * self._num_proven_tokens - work.num_prompt_tokens)
        least = 0 if work.num_prompt_tokens else FLOOR_TOKENS
        tile, num_free = self.tile_tokens, work.num_free(self.tile_tokens)
        num_tiles = max((num_tokens - num_free) // tile, -((num_free - least) // tile), 0)
        return num_free + num_tiles * tile

    @property
    def decode_s(self) -> tuple[float, float, float]:
        """Seconds of a step with decodes, per decode, and per token of their contexts."""
        constant, per_decode, per_token = self._decodes.weights
        return constant, per_decode / DECODES, per_token / DECODE_CONTEXT

    @property
    def prompt_s(self) -> tuple[float, float, float]:
        """Seconds of a step with prompts, per token, and per token and position."""
        constant, per_token, per_context = self._prompts.weights
        return constant, per_token / TOKENS, per_context / TOKEN_CONTEXT

    def _prompts_s(self, work: StepWork) -> float:
        return self._prompts.predict(work.prompt_features(self.tile_tokens))

    def _decoding_s(self, work: StepWork) -> float:
        return self._decodes.predict(work.decode_features()) if work.num_decodes else 0.0


class PromptBudget:
    """The room for prompts left in one step: by tokens and, beside decodes, by time."""

    def __init__(self, num_tokens: int, cost: StepCost, decodes: "list[Chunk]") -> None:
        self._num_tokens = num_tokens
        self._cost = cost if decodes else None
        self._work = work_of(decodes)
        self._known: tuple[int, int] | None = None  # a start and its room, until the next chunk

    def room(self, start: int) -> int:
        """Return how many tokens of a prompt fit, from position `start` on."""
        if self._cost is None or self._num_tokens <= 0:
            return self._num_tokens
        if self._known is None or self._known[0] != start:
            self._known = start, min(self._num_tokens, self._cost.room(self._work, start))
        return self._known[1]

    def take(self, chunk: "Chunk") -> None:
        """Count `chunk`. After one that does not end its prompt there is no room."""
        num_tokens = chunk.end - chunk.start
        self._known = None
        self._num_tokens = self._num_tokens - num_tokens if chunk.samples else 0
        self._work.add_prompt(chunk.start, num_tokens)


def _largest(square: float, linear: float, left: float) -> int:
    """Return the largest n >= 0 with square * n**2 + linear * n <= left; both factors are >= 0."""
    if left <= 0:
        return 0
    # This form of the root neither cancels nor divides by a `square` of zero.
    divisor = linear + math.sqrt(linear * linear + 4 * square * left)
    return int(min(2 * left / divisor, ENDLESS)) if divisor else ENDLESS


def _solve_non_negative(
    gram: list[list[float]], moment: list[float], before: list[float]
) -> list[float]:
    """Solve the normal equations of least squares, near the weights `before` where they are free.

    Features that would get negative weights are left out, the most negative first.
    """
    weights = [0.0] * len(moment)
    kept = list(range(len(moment)))
    while kept:
        solution = _solve(
            [[gram[i][j] for j in kept] for i in kept],
            [moment[i] for i in kept],
            [before[i] for i in kept],
        )
        worst = min(solution)
        if worst >= 0:
            for i, weight in zip(kept, solution, strict=True):
                weights[i] = weight
            break
        del kept[solution.index(worst)]
    return weights


def _solve(matrix: list[list[float]], right: list[float], before: list[float]) -> list[float]:
    """Solve a positive semidefinite system by elimination, with a ridge around `before`.

    Steps that are all alike do not tell a constant from a cost of each token: what earlier ones
    told is kept then.
    """
    size = len(right)
    ridge = RIDGE * max(matrix[i][i] for i in range(size)) + 1e-12
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        rows[i][i] += ridge
        rows[i][size] += ridge * before[i]
    for i, pivot in enumerate(rows):
        for row in rows:
            if row is not pivot:
                factor = row[i] / pivot[i]
                for j in range(i, size + 1):
                    row[j] -= factor * pivot[j]
    return [row[size] / row[i] for i, row in enumerate(rows)]
