"""The decision for each prompt: prefill it locally or remotely. Pure."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from tandem.decode.config import DisaggConfig, Policy
from tandem.decode.decision import Decision, PlacementCause
from tandem.decode.transfer_cost import TransferCost
from tandem.router.predict import (
    MAX_SLOWNESS,
    SHARE_TRIED,
    SHARE_UNBEARABLE,
    SURE_SHARE,
    PlaceLoad,
    Prediction,
    predict,
)
from tandem.runtime.wire.bounds import MAX_COUNT
from tandem.runtime.wire.messages import PrefillPlace, Targets

MIN_GAIN = 0.1  # of the local cost: a remote prefill moves KV, which is work of its own
CLAIM_SLACK_MS = 50.0
CHEAPER = 0.8  # of the cost here: at such a worker a ticket is computed better
SOONER_HERE = "this worker computes it sooner by now"  # than those that have not claimed it
LOOK_AGAIN_S = 0.25  # at a ticket that goes on waiting: as often as loads are reported
ALIKE = 2  # times the answers of another worker, that one may have which gets as many requests
TYPICAL_TOKENS = 1024  # of a ticket, before one is known
NUM_IN_MEAN = 8  # tickets, of which their mean length knows most
MAX_WAYS_GIVEN = 8  # by one ticket


@dataclass(slots=True)
class PrefillSide:
    """This worker and the prefill side, as far as a placement depends on them."""

    num_instances: int = 0
    num_silent: int = 0  # of these: they have not reported their load lately
    queue_connected: bool = False
    num_queued_jobs: int = 0
    num_ticket_tokens: int = 0  # uncached tokens of tickets that are not claimed yet
    here: PlaceLoad | None = None  # None: no step cost is known
    others: Sequence[PlaceLoad] = ()  # workers that take tickets
    transfer: TransferCost = field(default_factory=lambda: TransferCost(0.0))


def decide(
    config: DisaggConfig,
    num_uncached_tokens: int,
    side: PrefillSide,
    *,
    num_cached_tokens: int = 0,
    placement: PrefillPlace | None = None,
    prompt_logprobs: bool = False,
    drawn: float = 1.0,
    waited_ms: float = 0.0,
) -> Decision:
    """Return the place for a prompt of `num_uncached_tokens` tokens that must be computed.

    The time that it has waited so far counts against the target of its first token.

    Places that cannot work are excluded first; then the request's `placement` counts, then the
    policy. Log probabilities of a prompt exist where it is computed, and no message of a handoff
    carries them. `drawn`, from 0 to 1 by chance, lets a small share of prompts try the place that
    seems worse.
    """
    local = None
    if side.here is not None:
        local = predict(side.here, num_uncached_tokens, num_cached_tokens)
    if prompt_logprobs:
        decision = Decision("local", PlacementCause.PROMPT_LOGPROBS)
    else:
        left = _after(config, waited_ms)
        decision = _decide(
            left, num_uncached_tokens, num_cached_tokens, side, placement, local, drawn
        )
    return replace(
        decision,
        local_ms=0.0 if local is None else local.first_token_s * 1e3,
        ttft_target_ms=config.ttft_target_ms,
        itl_target_ms=config.itl_target_ms,
        places=decision.places if local is None else (local, *decision.places),
    )


def without_room(decision: Decision) -> Decision:
    """Return the decision for a prompt that should go away and whose blocks cannot be reserved."""
    return replace(decision, place="local", cause=PlacementCause.NO_BLOCKS)


def given_up(detail: str) -> Decision:
    """Return the decision for a prompt that comes back from a remote place."""
    return Decision("local", PlacementCause.FALLBACK, detail=detail)


def decide_again(
    config: DisaggConfig,
    num_uncached_tokens: int,
    side: PrefillSide,
    *,
    num_cached_tokens: int = 0,
    waited_ms: float = 0.0,
) -> Decision:
    """Return the place, as of now, for the prompt of a ticket that no worker has claimed in time.

    `side` counts the ticket itself. `waited_ms` as for `decide`.
    """
    without_it = dataclasses.replace(
        side, num_ticket_tokens=max(0, side.num_ticket_tokens - num_uncached_tokens)
    )
    return decide(
        config,
        num_uncached_tokens,
        without_it,
        num_cached_tokens=num_cached_tokens,
        waited_ms=waited_ms,
    )


def with_targets(config: DisaggConfig, targets: Targets | None) -> DisaggConfig:
    """Return the configuration for a request that may have targets of its own."""
    if targets is None:
        return config
    given = {"ttft_target_ms": targets.ttft_ms, "itl_target_ms": targets.itl_ms}
    return config.model_copy(update={name: ms for name, ms in given.items() if ms is not None})


def longest_local(config: DisaggConfig) -> int:
    """Return the tokens of the longest prompt that is computed here whatever the load."""
    if config.policy is Policy.ALWAYS_LOCAL:
        return MAX_COUNT
    if config.policy is Policy.ALWAYS_REMOTE:
        return 0
    if config.policy is Policy.ADAPTIVE and _has_targets(config):
        return 0
    return config.max_local_prefill_length


def _after(config: DisaggConfig, waited_ms: float) -> DisaggConfig:
    """Return the configuration with what a wait has left of the target of the first token."""
    if not waited_ms or config.ttft_target_ms is None:
        return config
    return config.model_copy(update={"ttft_target_ms": max(0.0, config.ttft_target_ms - waited_ms)})


def gives_way(
    config: DisaggConfig, place: PlaceLoad, num_uncached_tokens: int, waited_ms: float
) -> bool:
    """Return True if a ticket should be offered again later, and others before it.

    It should where its first token would miss the target at `place`, after the prompts that wait
    there. The caller sees to it that others wait, and that none gives way for ever.
    """
    if config.ttft_target_ms is None or config.policy is not Policy.ADAPTIVE:
        return False
    first_token_s = predict(place, num_uncached_tokens).first_token_s
    return waited_ms + first_token_s * 1e3 > config.ttft_target_ms


def mean_tokens(mean: float, num_uncached_tokens: int) -> float:
    """Return the mean length of a worker's tickets after one more; TYPICAL_TOKENS before any."""
    return mean + (num_uncached_tokens - mean) / NUM_IN_MEAN


def leaves_tickets(here: PlaceLoad, others: Sequence[PlaceLoad], num_tokens: int) -> bool:
    """Return True if a worker should leave tickets to one of `others`, who also take them.

    It should where a prompt of `num_tokens`, as its own tickets have, is clearly less costly there:
    running answers stand close on few workers, so that others have none. Loads are compared by the
    costs of this worker, since those that alike workers learned differ.
    """
    if not others:
        return False
    alike = (replace(other, costs=here.costs) for other in others)
    lowest_s = min(predict(other, num_tokens).cost_s for other in alike)
    return lowest_s < CHEAPER * predict(here, num_tokens).cost_s


def gets_alike(here: PlaceLoad | None, other: PlaceLoad) -> bool:
    """Return True if frontends may be taken to send `other` as many requests as this worker.

    Where few workers hold all answers, those without get none.
    """
    return here is None or here.num_decodes <= ALIKE * (other.num_decodes + 1)


def _decide(
    config: DisaggConfig,
    num_uncached: int,
    num_cached: int,
    side: PrefillSide,
    placement: PrefillPlace | None,
    local: Prediction | None,
    drawn: float,
) -> Decision:
    if placement == "local":
        return Decision("local", PlacementCause.ASKED)
    if placement is None and config.policy == Policy.ALWAYS_LOCAL:
        return Decision("local", PlacementCause.POLICY, config.policy)
    if side.num_instances == 0:
        return Decision("local", PlacementCause.NO_PREFILL_WORKER)
    if not side.queue_connected:
        return Decision("local", PlacementCause.QUEUE_LOST)
    if side.num_silent == side.num_instances:
        return Decision("local", PlacementCause.SILENT)
    if placement == "remote":
        return Decision("remote", PlacementCause.ASKED)
    if config.policy == Policy.ALWAYS_REMOTE:
        return Decision("remote", PlacementCause.POLICY, config.policy)
    decision = _by_threshold(config, num_uncached, side)
    if config.policy == Policy.THRESHOLD:
        return decision
    if decision.place == "local" and not _has_targets(config):
        return decision
    others = _others(side, num_uncached, num_cached)
    remote = min(others, key=lambda each: each.cost_s, default=None)
    decision = replace(decision, places=others)
    if local is None:
        return replace(decision, cause=PlacementCause.UNMEASURED, detail=decision.reason)
    if remote is None:
        return replace(decision, place="local", cause=PlacementCause.SILENT)
    predicted = _by_prediction(config, decision, local, remote)
    return _tried(predicted, local, remote, drawn)


def _tried(decision: Decision, local: Prediction, remote: Prediction, drawn: float) -> Decision:
    """Return `decision`, or now and then the other place where that is idle.

    A place that seems slow gets no prompts from which it could learn that it no longer is.
    """
    other, place = (remote, "remote") if decision.place == "local" else (local, "local")
    chosen = local if decision.place == "local" else remote
    is_bearable = other.first_token_s <= MAX_SLOWNESS * chosen.first_token_s
    share = SHARE_TRIED if is_bearable else SHARE_TRIED * SHARE_UNBEARABLE
    is_idle = other.wait_s == 0 and other.num_delayed == 0
    if decision.cause is PlacementCause.TARGET or not is_idle or drawn >= share:
        return decision
    return replace(decision, place=place, cause=PlacementCause.TRIED)


def _by_threshold(config: DisaggConfig, num_uncached: int, side: PrefillSide) -> Decision:
    decision = Decision(
        "local",
        PlacementCause.SHORT,
        config.policy,
        num_uncached,
        side.num_queued_jobs,
        config.max_local_prefill_length,
    )
    if num_uncached <= config.max_local_prefill_length:
        return decision
    is_full = side.num_queued_jobs >= config.max_prefill_queue_size
    if is_full and config.policy == Policy.THRESHOLD:  # adaptive predicts the wait in the queue
        limit = config.max_prefill_queue_size
        return replace(decision, cause=PlacementCause.QUEUE_FULL, limit=limit)
    return replace(decision, place="remote", cause=PlacementCause.LONG)


def _has_targets(config: DisaggConfig) -> bool:
    return config.ttft_target_ms is not None or config.itl_target_ms is not None


def _others(side: PrefillSide, num_uncached: int, num_cached: int) -> tuple[Prediction, ...]:
    """Return the prediction of each worker that takes tickets, which they share evenly."""
    if not side.others:
        return ()
    share = side.num_ticket_tokens // len(side.others)
    # Tickets are taken to be alike: the mean position of their tokens is half a length.
    context = share * side.num_ticket_tokens / max(1, side.num_queued_jobs) / 2
    transfer_s = side.transfer.seconds(num_uncached)
    num_tokens = num_uncached + num_cached  # its own prefix cache is not known here
    return tuple(
        _predict_ticket(other.behind(share, context), side.here, num_tokens, transfer_s)
        for other in side.others
    )


def _predict_ticket(
    other: PlaceLoad, here: PlaceLoad | None, num_tokens: int, transfer_s: float
) -> Prediction:
    """Return the prediction for a ticket at a worker, which begins none while it has own prompts.

    Those that it has are counted twice, as others come while they are computed. They become answers
    there, which the prompt delays unless these have a target, and busy workers learn costs that
    differ: it has to be better by its shorter queue alone.
    """
    own_share = other.num_own_tokens / max(1, other.num_waiting_tokens)
    other = other.behind(other.num_own_tokens, own_share * other.waiting_context)
    found = predict(other, num_tokens, transfer_s=transfer_s)
    if here is None or here.costs.has_target or not other.num_own_tokens:
        return found
    alike = replace(
        here,
        num_waiting_tokens=other.num_waiting_tokens,
        waiting_context=other.waiting_context,
        instance_id=other.instance_id,
    )
    return max(found, predict(alike, num_tokens, transfer_s=transfer_s), key=lambda p: p.cost_s)


def _by_prediction(
    config: DisaggConfig, decision: Decision, local: Prediction, remote: Prediction
) -> Decision:
    """Choose by missed targets, then by the delay of all answers together."""
    missed_locally = num_missed(config, local)
    missed_remotely = num_missed(config, remote)
    is_cheaper = remote.cost_s < local.cost_s * (1 - MIN_GAIN)
    place: PrefillPlace = "remote" if is_cheaper else "local"
    cause = PlacementCause.FASTER if is_cheaper else PlacementCause.SLOWER
    if missed_locally != missed_remotely:
        place = "remote" if missed_remotely < missed_locally else "local"
        cause = PlacementCause.TARGET
    return replace(
        decision,
        place=place,
        cause=cause,
        remote_ms=remote.first_token_s * 1e3,
        local_cost_ms=local.cost_s * 1e3,
        remote_cost_ms=remote.cost_s * 1e3,
        # As long as the prompt would wait here, or is expected to wait there
        claim_timeout_ms=min(
            config.claim_timeout_ms, max(local.wait_s, remote.wait_s) * 1e3 + CLAIM_SLACK_MS
        ),
    )


def may_wait_s(targets: DisaggConfig | Decision, waited_s: float) -> float:
    """Return the seconds that a computed first token may wait for its K/V, after `waited_s`.

    With both targets it leaves as its answer goes on, so that the second token comes in time too;
    without one of them at once.
    """
    if targets.ttft_target_ms is None or targets.itl_target_ms is None:
        return 0.0
    return max(0.0, SURE_SHARE * targets.ttft_target_ms / 1e3 - waited_s)


def num_missed(targets: DisaggConfig | Decision, prediction: Prediction) -> int:
    """Count the targets that a place might miss, for its running answers and for this one.

    The first token has SURE_SHARE of its target.
    """
    ttft_ms, itl_ms = targets.ttft_target_ms, targets.itl_target_ms
    misses_ttft = ttft_ms is not None and prediction.first_token_s * 1e3 > ttft_ms * SURE_SHARE
    misses_itl = itl_ms is not None and prediction.step_s * 1e3 > itl_ms
    return misses_ttft + misses_itl
