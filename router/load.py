"""The load of one instance: our own requests, and the excess of its last report. Pure."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from tandem.router.predict import PLANNED_SHARE, Pace, PlaceLoad, decode_step_s, nominal_s
from tandem.runtime.wire.cluster_messages import LoadReport, StepCosts, positions_of

RATE_S = 10.0  # in which the rate of prompts forgets most of what was before
MOST_MISSED = 3.0  # prompts that were due and have not come: by chance in 1 of 20 cases


class Rates(NamedTuple):
    """Seconds of computing prompts, a second."""

    away: float  # of prompts that may be computed elsewhere
    whole: float  # the same, had none a cached prefix
    local: float  # of those that are computed where they are answered
    num_away: float = 0.0  # prompts, a second, of `away`

    def after_silence(self, silence_s: float) -> "Rates":
        """Return what they are at most if none of `away` has come for so many seconds.

        Where prompts come independently of one another, so many of them have no gap this long at
        a higher rate, but in exp(-MOST_MISSED) of all cases: the load has changed.
        """
        num_missed = self.num_away * silence_s
        if num_missed <= MOST_MISSED:
            return self
        left = MOST_MISSED / num_missed
        return Rates(self.away * left, self.whole * left, self.local, self.num_away * left)


NO_RATES = Rates(0.0, 0.0, 0.0)


class Shared(Struct, gc=False):
    """Workers that take tickets too: their number, running answers, and rate of prompts."""

    num_workers: int = 0
    num_answers: int = 0
    context: float = 0.0  # tokens of all answers
    rates: Rates = NO_RATES  # at `rated_at_s`
    rated_at_s: float = 0.0
    away_at_s: float = 0.0  # when the last prompt came that may be computed elsewhere

    def rates_now(self, now_s: float) -> Rates:
        """Return the rates at `now_s`, up to which no other prompt came, as far as that tells."""
        return self.rates_at(now_s).after_silence(now_s - self.away_at_s)

    def rates_at(self, now_s: float) -> Rates:
        """Return the mean rates as of `now_s`, if no prompt comes until then."""
        if self.rates == NO_RATES or now_s == self.rated_at_s:
            return self.rates
        left = math.exp((self.rated_at_s - now_s) / RATE_S)
        away, whole, local, num_away = self.rates
        return Rates(away * left, whole * left, local * left, num_away * left)

    def replace(self, before: "Shared", after: "Shared") -> None:
        """Count some workers as they are now, in place of how they were."""
        if after is before:
            return
        self.num_workers += after.num_workers - before.num_workers
        self.num_answers += after.num_answers - before.num_answers
        self.context += after.context - before.context
        if (after.rates, after.rated_at_s) == (before.rates, before.rated_at_s):
            return  # no prompt has come in between
        at_s = max(self.rated_at_s, after.rated_at_s)
        rates = zip(self.rates_at(at_s), after.rates_at(at_s), before.rates_at(at_s), strict=True)
        self.rates = Rates(*(max(0.0, rate + new - old) for rate, new, old in rates))
        self.rated_at_s = at_s
        self.away_at_s = max(self.away_at_s, after.away_at_s)


@dataclass(slots=True)
class InstanceLoad:
    """An instance's load: our own requests, and the excess of its last report over them.

    A report ages. Its excess over our prompts is partly our answers, which end with our requests.
    Reports do not tell the parts apart, so all requests of an instance are assumed to be alike.
    """

    row: int  # in the table of all instances
    has_new_costs: bool = True  # since the table took them
    block_size: int = 16
    costs: StepCosts | None = None  # as the instance learned them, or borrowed; None: not known
    nominal_s: tuple[float, float] = (0.0, 0.0)  # of a typical prompt and step, by `costs`
    num_blocks: int = 0  # that it has; 0: not known
    num_rows: int = 0  # batch rows: answers that run at once; 0: not known
    takes_tickets: bool = False  # it computes prompts of other workers' answers too
    num_requests: int = 0
    num_prefilling: int = 0  # of these, before their first token
    active_blocks: int = 0
    pending_blocks: int = 0
    pending_context: float = 0.0  # the positions of their tokens, summed
    num_reports: int = 0
    num_reported: int = 0  # of our requests, present at the last report
    num_left: int = 0  # of these, still present
    answer_blocks: float = 0.0  # of these, at the last report
    foreign_blocks: float = 0.0  # of other frontends' requests
    foreign_pending_blocks: int = 0
    foreign_pending_context: float = 0.0  # as above
    foreign_decodes: int = 0
    foreign_requests: int = 0
    reported_context: float = 0.0  # tokens of a running answer; 0: not known
    rated: Shared = field(default_factory=Shared)  # the rates of our prompts alone
    shared: Shared = field(default_factory=Shared)  # as the table counts it

    def report(self, report: LoadReport, block_size: int) -> None:
        """Note the instance's own view, in which our requests are included."""
        self.block_size, self.num_blocks = block_size, report.num_blocks
        self.num_rows = report.max_num_seqs
        self.takes_tickets = report.role == "both"
        if report.costs is not None:
            self.set_costs(report.costs)
        active_blocks = max(
            0, report.num_blocks - report.num_free_blocks - report.num_cached_blocks
        )
        num_requests = report.num_running + report.num_waiting  # 0: not known
        ours = self.num_requests / num_requests if num_requests else 0.0
        excess_blocks = max(0, active_blocks - self.active_blocks)
        self.foreign_blocks = min(excess_blocks, active_blocks * max(0.0, 1 - ours))
        self.answer_blocks = excess_blocks - self.foreign_blocks
        pending_blocks = report.num_waiting_tokens // block_size
        self.foreign_pending_blocks = max(0, pending_blocks - self.pending_blocks)
        self.foreign_pending_context = max(0.0, report.waiting_context - self.pending_context)
        self.foreign_decodes = max(0, report.num_decodes - self._own_decodes())
        self.foreign_requests = max(0, num_requests - self.num_requests)
        self.reported_context = report.decode_context / max(1, report.num_decodes)
        self.num_reported = self.num_left = self.num_requests
        self.num_reports += 1

    def set_costs(self, costs: StepCosts) -> None:
        """Set the costs of steps, the instance's own or borrowed ones."""
        if costs != self.costs:
            self.costs, self.nominal_s = costs, nominal_s(costs)
            self.has_new_costs = True

    def pace(self) -> Pace[float] | None:
        """Return the pace, or None while no costs are known."""
        return None if self.costs is None else Pace.of(self._place(self.costs))

    def active(self) -> float:
        """Return the blocks of running requests, of all frontends."""
        answers = self.answer_blocks * self.num_left / max(1, self.num_reported)
        return self.active_blocks + answers + self.foreign_blocks

    def pending(self) -> int:
        """Return the blocks that wait to be prefilled, of all frontends."""
        return self.pending_blocks + self.foreign_pending_blocks

    def sharing(self) -> Shared:
        """Return this worker's part of those that take tickets too.

        Without answers it can compute the others' prompts.
        """
        if not self.takes_tickets or self.costs is None:
            return _NOT_SHARED
        num_decodes = self.num_decodes
        context = num_decodes * self.context
        rated = self.rated
        return Shared(1, num_decodes, context, rated.rates, rated.rated_at_s, rated.away_at_s)

    @property
    def max_context(self) -> int:
        """The tokens of answers that it has blocks for."""
        return self.num_blocks * self.block_size

    @property
    def ttft_target_s(self) -> float:
        """The seconds in which a first token should come; infinity without such a target."""
        target_s = None if self.costs is None else self.costs.ttft_target_s
        return math.inf if target_s is None else target_s

    def num_fillable(self) -> float:
        """Return the blocks that one more answer may have here; infinity where it is not known.

        It is less than any number where the answer waits for a batch row.
        """
        if self.num_rows and self.num_answers >= self.num_rows:
            return -math.inf
        return self.num_blocks - self.active() if self.num_blocks else math.inf

    def num_in_time(self) -> float:
        """Return the blocks that one more answer may have with all steps of decodes in time.

        Infinity without a target of the time between tokens.
        """
        costs = self.costs
        if costs is None or not costs.has_target:
            return math.inf
        context = self.active() * self.block_size
        decodes_s = decode_step_s(costs, self.num_answers + 1, int(context))
        left_s = PLANNED_SHARE * costs.max_step_s - decodes_s
        context_s = costs.decode_s[2] * self.block_size
        return left_s / context_s if context_s else math.copysign(math.inf, left_s)

    @property
    def num_answers(self) -> int:
        """Requests that have a batch row or will, of all frontends."""
        return self.num_requests + self.foreign_requests

    def rate_prompt(self, num_tokens: int, num_cached: int, now_s: float) -> None:
        """Count a prompt of ours with so many tokens to be computed, where tickets are taken."""
        if self.costs is None or not self.takes_tickets:
            return
        _, per_token_s, per_position_s = self.costs.prompt_s
        away, whole, local, num_away = self.rated.rates_at(now_s)
        away_at_s = self.rated.away_at_s
        num_all = num_cached + num_tokens
        compute_s = num_tokens * per_token_s + positions_of(num_tokens, num_cached) * per_position_s
        whole_s = num_all * per_token_s + positions_of(num_all) * per_position_s
        if num_tokens <= self.costs.longest_local:
            local += compute_s / RATE_S
        else:
            away, whole = away + compute_s / RATE_S, whole + whole_s / RATE_S
            num_away, away_at_s = num_away + 1 / RATE_S, now_s
        rates = Rates(away, whole, local, num_away)
        self.rated = Shared(rates=rates, rated_at_s=now_s, away_at_s=away_at_s)

    @property
    def num_decodes(self) -> int:
        """Running answers, of all frontends."""
        return self._own_decodes() + self.foreign_decodes

    @property
    def context(self) -> float:
        """Tokens of an answer: as reported, else of a prompt."""
        num_tokens = self.active_blocks * self.block_size
        return self.reported_context or num_tokens / max(1, self.num_requests)

    def _place(self, costs: StepCosts) -> PlaceLoad:
        """Return the load as predictions see it."""
        num_decodes = self._own_decodes() + self.foreign_decodes
        return PlaceLoad(
            costs,
            num_decodes,
            int(num_decodes * self.context) if num_decodes else 0,
            (self.pending_blocks + self.foreign_pending_blocks) * self.block_size,
            waiting_context=self.pending_context + self.foreign_pending_context,
        )

    def _own_decodes(self) -> int:
        return max(0, self.num_requests - self.num_prefilling)


_NOT_SHARED = Shared()
