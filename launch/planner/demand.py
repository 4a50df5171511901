"""The workers that prompts and answers need, from the load reports of alike workers. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tandem.decode.admission import TYPICAL_TOKENS
from tandem.router.holding import FILLED_SHARE, PACKED_SHARE
from tandem.router.predict import PlaceLoad, decode_step_s, predict, share_left
from tandem.runtime.wire.cluster_messages import LoadReport, StepCosts, WorkerRole

BUSY_S = 5.0  # in which the share of time with prompts forgets most of what was before
PREFILL_SHARE = 0.9  # of a prefill worker's time, that prompts take before they wait for long
BESIDE_SHARE = 0.8  # of what answers leave of a worker's time, likewise
TINY_S = 1e-12
CLEAR_S = 5.0  # in which prompts that wait should be computed, beside those that come


@dataclass(slots=True)
class WorkerLoad:
    """The last report of a worker, and the share of its time in which it had prompts."""

    report: LoadReport
    came_s: float
    busy_share: float = 0.0

    def add(self, report: LoadReport, now_s: float) -> None:
        """Take a newer report; the one before held until now. Another role begins anew."""
        if report.role != self.report.role:
            self.busy_share = 0.0
        else:
            kept = math.exp((self.came_s - now_s) / BUSY_S)
            self.busy_share = kept * self.busy_share + (1 - kept) * (self.num_prompt_tokens > 0)
        self.report, self.came_s = report, now_s

    @property
    def role(self) -> WorkerRole:
        return self.report.role

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of prompts that are not computed yet. Each answer counts one in a report."""
        return max(0, self.report.num_waiting_tokens - self.report.num_decodes)

    def answers_share(self, block_size: int) -> float:
        """Return the share of batch rows or blocks that running answers take, the larger one.

        It is also the share of the requests waiting here that more prefill workers do not help.
        """
        report = self.report
        rows = report.num_decodes / report.max_num_seqs if report.max_num_seqs else 0.0
        room = report.decode_context / max(1, report.num_blocks * block_size)
        return min(1.0, max(rows, room))


@dataclass(frozen=True, slots=True)
class Demand:
    """The work that comes to the workers of one deployment, and the predictions for it."""

    costs: StepCosts
    prompts: float  # seconds of computing prompts, a second
    tokens_per_s: float  # of all answers
    context: float  # tokens of an answer and its prompt
    max_context: float  # tokens that the blocks of one worker hold
    max_num_seqs: int  # batch rows of one worker; 0: not known
    held: float  # generating workers that have blocks for all sequences held there now
    num_shared_tokens: int  # of prompts that wait in the queue and at prefill workers
    kv_share: float  # of the blocks of generating workers, in use

    @property
    def _each_s(self) -> float:
        """The seconds that one answer adds to a step."""
        return self.costs.decode_s[1] + self.costs.decode_s[2] * self.context

    @property
    def _longest_s(self) -> float:
        return PACKED_SHARE * self.costs.max_step_s

    def step_s(self, num_generating: int) -> float:
        """Return the seconds of a step of answers spread over so many workers.

        Tokens come at the same rate however long steps are, so longer steps hold more answers.
        """
        left = 1 - self._each_s * self.tokens_per_s / num_generating
        constant_s = self.costs.decode_s[0]
        return constant_s / left if left * self._longest_s > constant_s else self._longest_s

    def answers_load(self, num_generating: int) -> float:
        """Return the share that answers take of the tokens that so many workers can draw.

        The longest step, the blocks and the batch rows limit the answers of one worker.
        """
        constant_s, each_s = self.costs.decode_s[0], max(self._each_s, TINY_S)
        most = max(1.0, (self._longest_s - constant_s) / each_s)
        if self.context:
            most = min(most, FILLED_SHARE * self.max_context / self.context)
        if self.max_num_seqs:
            most = min(most, FILLED_SHARE * self.max_num_seqs)
        capacity = most / (constant_s + most * each_s)
        return self.tokens_per_s / (num_generating * capacity)

    def prompts_load(self, num_prefill: int, num_generating: int) -> float:
        """Return the share that prompts take of prefill workers' time, and of what answers leave.

        Or of the target of the first token, where more of that has gone.

        Generating workers compute prompts beside their answers, in what these leave of a step.
        """
        step_s = self.step_s(num_generating) if self.tokens_per_s else 0.0
        beside = num_generating * share_left(self.costs, step_s)
        by_time = self.prompts / (PREFILL_SHARE * num_prefill + BESIDE_SHARE * beside)
        target_s = self.costs.ttft_target_s or CLEAR_S
        return max(by_time, self.first_token_s(num_prefill or num_generating) / target_s)

    def first_token_s(self, num_takers: int) -> float:
        """Return the seconds to the first token of a typical prompt where so many share them."""
        share = self.num_shared_tokens // num_takers
        return predict(_idle(self.costs, share), TYPICAL_TOKENS).first_token_s

    def load(self, num_prefill: int, num_generating: int) -> float:
        """Return the load of the fuller side; above 1 it cannot keep up."""
        prompts = self.prompts_load(num_prefill, num_generating)
        return max(prompts, self.answers_load(num_generating))


def demand_of(
    workers: Iterable[WorkerLoad], num_ticket_tokens: int, block_size: int
) -> Demand | None:
    """Return the demand for workers of one deployment; None while no costs are known.

    `num_ticket_tokens` are those of prompts that no prefill worker has claimed.
    """
    loads = list(workers)
    prefill = [each for each in loads if each.role == "prefill"]
    generating = [each for each in loads if each.role != "prefill"]
    costs = _median_costs(loads)
    if costs is None or not generating:
        return None
    num_waiting = num_ticket_tokens + int(
        sum(each.num_prompt_tokens * (1 - each.answers_share(block_size)) for each in loads)
    )
    clearing_s = predict(_idle(costs, num_waiting), TYPICAL_TOKENS).wait_s
    shared = num_ticket_tokens + sum(each.num_prompt_tokens for each in prefill)
    reports = [each.report for each in generating]
    num_blocks = sum(report.num_blocks for report in reports)
    kv_share = sum(map(_num_used_blocks, generating)) / max(1, num_blocks)
    num_decodes = sum(report.num_decodes for report in reports)
    return Demand(
        costs=costs,
        prompts=sum(_prompt_share(each, costs) for each in loads) + clearing_s / CLEAR_S,
        tokens_per_s=sum(_tokens_per_s(each, costs, block_size) for each in generating),
        context=sum(report.decode_context for report in reports) / max(1, num_decodes),
        max_context=max(1.0, num_blocks * block_size / len(generating)),
        max_num_seqs=reports[0].max_num_seqs,
        held=kv_share * len(generating) / FILLED_SHARE,
        num_shared_tokens=shared,
        kv_share=kv_share,
    )


def moved_s(report: LoadReport, costs: StepCosts) -> float:
    """Return the seconds of computing the answers of a worker anew, where others resume them."""
    return predict(_idle(costs, report.decode_context), TYPICAL_TOKENS).wait_s


def _idle(costs: StepCosts, num_waiting_tokens: int) -> PlaceLoad:
    return PlaceLoad(costs, num_waiting_tokens=num_waiting_tokens)


def _median_costs(loads: list[WorkerLoad]) -> StepCosts | None:
    """Return the costs of a worker in the middle; prefill workers may not know those of answers."""
    known = [each.report.costs for each in loads if each.report.costs is not None]
    known = [costs for costs in known if any(costs.decode_s)]
    known.sort(key=lambda costs: costs.prompt_s[1])
    return known[len(known) // 2] if known else None


def _decodes_s(report: LoadReport, costs: StepCosts) -> float:
    return decode_step_s(costs, report.num_decodes, report.decode_context)


def _prompt_share(load: WorkerLoad, costs: StepCosts) -> float:
    """Return the share of a worker's time that prompts take."""
    return load.busy_share * share_left(costs, _decodes_s(load.report, costs))


def _tokens_per_s(load: WorkerLoad, costs: StepCosts, block_size: int) -> float:
    """Return the rate of tokens of a worker's answers, with those that wait for these to end."""
    report = load.report
    decodes_s = _decodes_s(report, costs)
    step_s = decodes_s + load.busy_share * max(0.0, costs.max_step_s - decodes_s)
    num_waiting = load.answers_share(block_size) * report.num_waiting
    return (report.num_decodes + num_waiting) / step_s if report.num_decodes else 0.0


def _num_used_blocks(load: WorkerLoad) -> int:
    report = load.report
    return max(0, report.num_blocks - report.num_free_blocks - report.num_cached_blocks)
