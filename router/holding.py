"""How many workers hold the answers, where workers that answer requests take tickets too. Pure.

All of them may hold some, beside the prompts that they compute; or few hold them all, and the
others compute prompts without answers that wait for these.
"""

import math

from tandem.router.load import Rates, Shared
from tandem.router.predict import ANSWER_WEIGHT, decode_step_s, share_left
from tandem.runtime.wire.cluster_messages import StepCosts

PACKED_SHARE = 0.85  # of the longest step, that answers with a target take on few workers
FILLED_SHARE = 0.9  # of the blocks, that they take there
LEAST_SHARE = 0.05  # of a worker's time, that prompts take for answers to stand together
BUSY_SHARE = 0.95  # of the time of workers without answers, that prompts take there
LEAST_FREE = 0.05  # of a worker's time for answers, beside whatever prompts
LEAST_FREE_OF_QUEUE = 0.2  # of the workers' time, where the wait of prompts is reckoned
MAX_STEPS = 16  # from all workers with answers to none, in which the best number is looked for
CHANGE_GAIN = 1.03  # times as few that wait, for another number of workers with answers
SURE_GAIN = 1.08  # times the time for prompts, that few workers with answers must leave
PRESSING_SHARE = 0.3  # of the time that answers on all workers leave prompts
_TINY_S = 1e-12


def num_holding(
    costs: StepCosts,
    max_context: float,
    max_num_seqs: int,
    shared: Shared,
    rates: Rates,
    num_held: int = 0,
) -> int:
    """Return how many workers should hold the answers, if the others compute prompts; or all.

    `shared` has the workers and their answers, `rates` are those of its prompts. A worker has room
    for `max_context` tokens and for `max_num_seqs` answers, 0 where that is not known; `num_held`
    hold them by now.

    Spread over all workers, answers and prompts share each worker's time. With a target of the time
    between tokens prompts get what it leaves of each step; where they need much of that, few
    workers hold the answers, in steps of PACKED_SHARE of the longest, if that leaves prompts
    clearly more in all. Prompts that are computed elsewhere are computed whole: answers with cached
    prefixes stand together for more. Without a target `_num_without_target` counts.
    """
    if not costs.has_target:
        return _num_without_target(costs, max_context, max_num_seqs, shared, rates, num_held)
    num_workers = shared.num_workers
    share = 1 / num_workers
    left = share_left(costs, _step_of(costs, shared, num_workers))
    if rates.away * share <= PRESSING_SHARE * left:
        return num_workers
    longest_s = PACKED_SHARE * costs.max_step_s
    constant_s = costs.decode_s[0]
    by_time = (_step_of(costs, shared, 1) - constant_s) / max(longest_s - constant_s, _TINY_S)
    by_room = _filling(shared, max_context, max_num_seqs) / FILLED_SHARE
    num_held = min(max(1, math.ceil(max(by_time, by_room))), num_workers)
    held_left = share_left(costs, _step_of(costs, shared, num_held))
    packed = num_workers - num_held + num_held * held_left
    needed = SURE_GAIN * num_workers * left * rates.whole / rates.away
    return num_held if packed > needed else num_workers


def _num_without_target(
    costs: StepCosts,
    max_context: float,
    max_num_seqs: int,
    shared: Shared,
    rates: Rates,
    num_held: int,
) -> int:
    """Return the number of workers with answers at which all together wait least.

    Answers that share workers with prompts wait for these: a token takes a step of the answers,
    and the share of time that prompts need beside them more. Prompts wait for one another. Those
    that may go elsewhere take up to BUSY_SHARE of the other workers; the rest is computed among
    answers.
    """
    num_workers = shared.num_workers
    if rates.away <= LEAST_SHARE * num_workers or not shared.num_answers:
        return num_workers
    filling = _filling(shared, max_context, max_num_seqs)
    least_s, best, spread_s = math.inf, num_workers, 0.0
    for num in range(num_workers, 0, -max(1, num_workers // MAX_STEPS)):
        if num < num_workers and filling > FILLED_SHARE * num:
            continue
        elsewhere = min(rates.away, BUSY_SHARE * (num_workers - num))
        beside = rates.away - elsewhere + rates.local
        token_s = _step_of(costs, shared, num) / max(1.0 - beside / num, LEAST_FREE)
        spread_s = spread_s or token_s  # they all hold some at first
        waiting = ANSWER_WEIGHT * shared.num_answers * token_s / max(spread_s, _TINY_S)
        waiting += _waits(num, beside - rates.local, beside)
        waiting += _waits(num_workers - num, elsewhere, elsewhere)
        if num != num_held:
            waiting *= CHANGE_GAIN
        if waiting < least_s:
            least_s, best = waiting, num
    return best


def _waits(num_workers: int, rate: float, busy: float) -> float:
    """Return the prompts of `rate` that wait where `num_workers` compute `busy` seconds a second.

    By Sakasegawa's approximation of the queue M/M/c, up to where it grows without end: a load that
    high lasts no longer than prompts are willing to wait.
    """
    if rate <= 0.0:
        return 0.0
    used = min(busy / num_workers, 1.0)
    grown = math.pow(used, math.sqrt(2 * (num_workers + 1)) - 1)
    return rate * grown / (num_workers * max(LEAST_FREE_OF_QUEUE, 1.0 - used))


def _filling(shared: Shared, max_context: float, max_num_seqs: int) -> float:
    """Return how many workers the answers fill, by blocks or by batch rows."""
    by_rows = shared.num_answers / max_num_seqs if max_num_seqs else 0.0
    return max(shared.context / max(max_context, 1.0), by_rows)


def _step_of(costs: StepCosts, shared: Shared, num_held: int) -> float:
    """Return the seconds of a step of decodes where `num_held` workers hold the answers."""
    num_answers = math.ceil(shared.num_answers / num_held)
    return decode_step_s(costs, num_answers, int(shared.context / num_held))
