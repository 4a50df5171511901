from dataclasses import replace

import pytest

from tandem.runtime.wire.handoff_messages import (
    CancelHandoff,
    Claim,
    Claimed,
    ClaimRefused,
    FirstToken,
    Settled,
)
from tandem.runtime.wire.messages import SamplingParams
from tandem.transfer.handoff.actions import (
    Abort,
    Admit,
    PrefillLocally,
    ReleaseQuarantined,
    Retract,
    Span,
    Verify,
)
from tandem.transfer.handoff.causes import CloseCause, DropCause
from tandem.transfer.handoff.decode import LATE_BYTES_S, DecodeHandoff, HandoffState
from tandem.transfer.handoff.landed import Landed, SettledNotice, encode_landed
from tandem.transfer.layout import KvLayout

ID, SECRET = b"i" * 16, b"s" * 16
CLAIM = Claim(ID, 1, "p", "e1")
FIRST = FirstToken(ID, 1, SECRET, b"", token_id=42)
GRANT = Claimed(
    secret=SECRET,
    lease_ms=10_000,
    token_ids=b"",
    sampling=SamplingParams(),
    fill=[(4, 70), (5, 71), (6, 80)],
    cached_ordinals=[0, 1, 2, 3],
)
FILL = (70, 71, 80)
WHOLE = range(4)  # of the model's layers
LAYOUT = KvLayout(len(WHOLE), num_kv_heads=4, block_size=16, head_dim=8, dtype="float32")
SPAN = Span(0, 0, WHOLE)
EXPIRED = PrefillLocally(CloseCause.LEASE_EXPIRED, "lease expired", quarantined=False)


def decode_handoff(*, verify: bool = True, layout: KvLayout = LAYOUT) -> DecodeHandoff:
    """Deadline at 20 s, lease 10 s from the claim, grace 2 s."""
    return DecodeHandoff(
        ID,
        1,
        GRANT,
        deadline=20.0,
        grace_ms=2000,
        layout=layout,
        verify=verify,
    )


def claimed(
    now: float = 0.0,
    *,
    prefill_tp: int = 1,
    is_afar: bool = False,
    layout: KvLayout = LAYOUT,
) -> DecodeHandoff:
    handoff = decode_handoff(layout=layout)
    handoff.published()
    claim = Claim(ID, 1, "p", "e1", prefill_tp)
    assert handoff.claim(claim, now, is_afar=is_afar) == GRANT
    return handoff


def landed(
    *blocks: tuple[int, int],
    secret: bytes = SECRET,
    attempt: int = 1,
    rank: int = 0,
    layers: range = WHOLE,
) -> Landed:
    return Landed(ID, attempt, secret, rank, 0, layers, blocks)


def settled(num_completed: int = 1, num_failed: int = 0, error: str = "") -> Settled:
    return Settled(ID, 1, num_completed, num_failed, error)


def test_a_sequence_is_admitted_when_all_blocks_are_proven_and_its_first_token_is_there() -> None:
    handoff = claimed()
    assert handoff.state is HandoffState.CLAIMED
    [verify] = handoff.landed(landed((4, 1), (6, 3)), 1.0)
    assert verify == Verify(SPAN, ((4, 70, 1), (6, 80, 3)))
    assert handoff.state is HandoffState.WRITING
    assert handoff.verified(SPAN, 4, True) == handoff.verified(SPAN, 6, True) == []
    assert handoff.first_token(FIRST) == []
    assert handoff.landed(landed((5, 2)), 1.0) == [Verify(SPAN, ((5, 71, 2),))]
    assert handoff.settled(settled(2), 1.0) == []
    assert not handoff.may_reuse_blocks
    assert handoff.verified(SPAN, 5, True) == [Admit(FIRST)]
    assert handoff.state is HandoffState.ADMITTED
    assert handoff.cancel() == handoff.tick(1000.0) == handoff.settled(settled(), 1000.0) == []
    handoff.check_invariants()


def test_a_worker_that_awaits_no_first_token_admits_at_the_last_proof() -> None:
    handoff = DecodeHandoff(
        ID, 1, GRANT, deadline=20.0, grace_ms=2000, layout=LAYOUT, awaits_first=False
    )
    handoff.published()
    handoff.claim(CLAIM, 0.0)
    assert not handoff.complete
    handoff.landed(landed((4, 1), (5, 2), (6, 3)), 1.0)
    assert handoff.verified(SPAN, 4, True) == handoff.verified(SPAN, 5, True) == []
    assert handoff.state is HandoffState.WRITING and not handoff.complete
    assert handoff.verified(SPAN, 6, True) == [Admit(None)]
    assert handoff.state is HandoffState.ADMITTED and handoff.may_reuse_blocks
    handoff.check_invariants()


def test_nothing_has_landed_and_nothing_is_proven_before_a_claim() -> None:
    handoff = decode_handoff()
    handoff.published()
    assert handoff.state is HandoffState.QUEUED
    assert not handoff.all_landed and not handoff.all_proven
    assert handoff.claim(Claim(ID, 1, "p", "e1", 4), 0.0) == GRANT
    assert handoff.claimant_tp_size == 4
    handoff.published()  # news of the ticket may come after the claim
    assert handoff.state is HandoffState.CLAIMED


def test_without_verification_landed_blocks_are_proven() -> None:
    handoff = decode_handoff(verify=False)
    handoff.claim(CLAIM, 0.0)
    handoff.first_token(FIRST)
    assert handoff.landed(landed((4, 1), (5, 2), (6, 3)), 1.0) == [Admit(FIRST)]


def test_before_a_claim_blocks_are_clean_whatever_ends_the_handoff() -> None:
    handoff = decode_handoff()
    assert handoff.cancel() == [Abort(quarantined=False)]
    assert handoff.may_reuse_blocks
    handoff = decode_handoff()
    assert handoff.next_tick == 20.0
    assert handoff.tick(19.9) == []
    assert handoff.tick(20.0) == [
        PrefillLocally(CloseCause.DEADLINE, "deadline", quarantined=False)
    ]
    handoff = decode_handoff()
    assert handoff.fail(CloseCause.QUEUE_LOST, "no queue") == [
        PrefillLocally(CloseCause.QUEUE_LOST, "no queue", quarantined=False)
    ]


def test_after_a_claim_blocks_are_held_until_p_settles() -> None:
    handoff = claimed()
    assert handoff.cancel() == [Abort(quarantined=True), Retract("p", CancelHandoff(ID, 1))]
    assert handoff.state is HandoffState.CLOSING
    assert not handoff.may_reuse_blocks
    assert handoff.landed(landed((4, 1)), 1.0) == handoff.first_token(FIRST) == []
    assert handoff.settled(settled(0, 0, "cancelled"), 1.0) == [ReleaseQuarantined(FILL)]
    assert handoff.may_reuse_blocks
    assert handoff.settled(settled(), 1.0) == []
    assert handoff.dropped == {DropCause.LATE: 2, DropCause.DUPLICATE: 1}


def test_a_deadline_within_the_lease_holds_blocks_until_the_lease_and_its_grace_are_over() -> None:
    handoff = claimed(now=15.0)
    assert handoff.next_tick == 20.0
    local, retract = handoff.tick(20.0)
    assert local == PrefillLocally(CloseCause.DEADLINE, "deadline", quarantined=True)
    assert isinstance(retract, Retract)
    assert handoff.next_tick == 27.0
    assert handoff.tick(25.1) == handoff.tick(27.0) == []
    assert handoff.tick(27.1) == [ReleaseQuarantined(FILL)]
    assert handoff.next_tick is None


def test_a_lease_that_runs_out_first_leaves_clean_blocks() -> None:
    handoff = claimed()
    handoff.landed(landed((4, 1)), 1.0)
    assert handoff.tick(12.0) == []
    assert handoff.tick(12.1) == [EXPIRED]
    assert handoff.landed(landed((5, 1)), 12.2) == []


def test_a_notice_after_lease_and_grace_is_dropped_even_before_the_tick() -> None:
    handoff = claimed()
    assert handoff.landed(landed((5, 1)), 12.0)
    assert handoff.landed(landed((4, 1)), 12.1) == []
    assert handoff.dropped == {DropCause.LATE: 1}


def test_the_same_claim_again_gets_the_same_answer_and_a_longer_lease() -> None:
    handoff = claimed()
    assert handoff.claim(CLAIM, 5.0) == GRANT
    assert handoff.tick(16.9) == []
    assert handoff.tick(17.1) == [EXPIRED]


@pytest.mark.parametrize(
    "claim",
    [
        Claim(ID, 2, "p", "e1"),
        Claim(ID, 0, "p", "e1"),
        Claim(b"x" * 16, 1, "p", "e1"),
        Claim(ID, 1, "other", "e1"),
        Claim(ID, 1, "p", "e2"),
    ],
)
def test_a_claimed_handoff_refuses_any_other_claim_as_stale(claim: Claim) -> None:
    handoff = claimed()
    assert handoff.claim(claim, 1.0) == ClaimRefused("stale")
    assert handoff.claimant == ("p", "e1")


def test_refusals_say_why() -> None:
    assert decode_handoff().claim(CLAIM, 20.0) == ClaimRefused("expired")
    handoff = decode_handoff()
    handoff.tick(20.0)
    assert handoff.claim(CLAIM, 20.1) == ClaimRefused("expired")
    handoff = decode_handoff()
    handoff.cancel()
    assert handoff.claim(CLAIM, 1.0) == ClaimRefused("cancelled")
    handoff = claimed()
    handoff.landed(landed((4, 1), (5, 2), (6, 3)), 1.0)
    handoff.settled(settled(), 1.0)
    assert handoff.claim(CLAIM, 1.0) == ClaimRefused("stale")
    for tp_size in (0, 3):
        claim = Claim(ID, 1, "p", "e1", tp_size)
        assert decode_handoff().claim(claim, 0.0) == ClaimRefused("stale")


@pytest.mark.parametrize(
    ("claim", "now", "cause"),
    [(CLAIM, 20.0, DropCause.CLAIM_EXPIRED), (Claim(ID, 2, "p", "e1"), 0.0, DropCause.CLAIM_STALE)],
)
def test_refusals_are_counted(claim: Claim, now: float, cause: DropCause) -> None:
    handoff = decode_handoff()
    handoff.claim(claim, now)
    assert handoff.dropped == {cause: 1}


def test_messages_after_the_end_are_counted_as_such() -> None:
    handoff = claimed()
    handoff.peer_gone("p", "e1")
    assert handoff.settled(settled(), 1.0) == []
    assert handoff.dropped == {DropCause.DUPLICATE: 1}
    handoff = claimed()
    handoff.cancel()
    notices = [(0, encode_landed(landed((4, 1))))]
    assert handoff.settled(Settled(ID, 1, 1, 0, notices=notices), 1.0)
    assert handoff.dropped == {}


def test_notices_with_another_secret_or_attempt_change_nothing() -> None:
    handoff = claimed()
    assert handoff.landed(landed((4, 9), secret=b"x" * 16), 1.0) == []
    assert handoff.landed(landed((4, 9), attempt=2), 1.0) == []
    assert handoff.settled_notice(SettledNotice(ID, 1, b"x" * 16, 0, 1)) == []
    assert handoff.settled(Settled(ID, 2, 0, 1), 1.0) == []
    assert handoff.first_token(FirstToken(ID, 2, SECRET, b"", token_id=1)) == []
    assert handoff.first_token(FirstToken(ID, 1, b"x" * 16, b"", token_id=1)) == []
    assert handoff.first_token(FirstToken(ID, 1, SECRET, b"another run", token_id=1)) == []
    assert handoff.first is None
    assert handoff.state is HandoffState.CLAIMED
    assert handoff.dropped == {
        DropCause.BAD_SECRET: 3,
        DropCause.STALE: 3,
        DropCause.NOT_THE_CLAIMANT: 1,
    }


def test_nothing_is_believed_before_a_claim() -> None:
    handoff = decode_handoff()
    assert handoff.landed(landed((4, 1)), 1.0) == handoff.first_token(FIRST) == []
    assert handoff.settled(settled(), 0.5) == []
    assert handoff.state is HandoffState.ALLOCATED
    assert handoff.claim(CLAIM, 1.0) == GRANT


def test_repeated_messages_are_counted_and_change_nothing() -> None:
    handoff = claimed()
    handoff.landed(landed((4, 1), (5, 2), (6, 3)), 1.0)
    handoff.first_token(FIRST)
    assert handoff.landed(landed((4, 1)), 1.0) == []
    assert handoff.first_token(FirstToken(ID, 1, SECRET, b"", token_id=43)) == []
    assert handoff.first == FIRST
    handoff.settled(settled(1), 1.0)
    assert handoff.settled(settled(0, 1), 1.0) == []
    assert handoff.state is HandoffState.WRITING
    assert handoff.dropped == {DropCause.DUPLICATE: 3}


@pytest.mark.parametrize("blocks", [((4, 2),), ((9, 1),), ((5, 1), (4, 2))])
def test_a_conflicting_checksum_or_an_ordinal_never_given_ends_the_handoff(
    blocks: tuple[tuple[int, int], ...],
) -> None:
    handoff = claimed()
    handoff.landed(landed((4, 1)), 1.0)
    local, _ = handoff.landed(landed(*blocks), 1.0)
    assert isinstance(local, PrefillLocally) and local.quarantined
    assert local.cause is CloseCause.VIOLATION
    assert "p.e1" in local.detail
    [(dropped, num)] = handoff.dropped.items()
    assert dropped in (DropCause.CONFLICT, DropCause.UNKNOWN_ORDINAL) and num == 1


def test_a_checksum_that_does_not_match_ends_the_handoff_in_quarantine() -> None:
    handoff = claimed()
    handoff.landed(landed((4, 1), (5, 2)), 1.0)
    local, _ = handoff.verified(SPAN, 5, False)
    assert local == PrefillLocally(
        CloseCause.CORRUPT, "checksum of ordinal 5 from p.e1 does not match", quarantined=True
    )
    assert handoff.verified(SPAN, 4, True) == []
    assert handoff.dropped == {DropCause.CHECKSUM: 1, DropCause.LATE: 1}


@pytest.mark.parametrize("is_notice", [False, True])
def test_a_failed_write_may_land_after_it_has_settled(is_notice: bool) -> None:
    handoff = claimed()
    handoff.landed(landed((4, 1)), 1.0)
    if is_notice:
        actions = handoff.settled_notice(SettledNotice(ID, 1, SECRET, 1, 1))
    else:
        actions = handoff.settled(settled(1, 1, "link down"), 1.0)
    detail = "1 writes of p.e1 failed" if is_notice else "link down"
    assert actions[0] == PrefillLocally(CloseCause.FAILED, detail, quarantined=True)
    assert isinstance(actions[1], Retract)
    assert handoff.settled(settled(1, 1, "link down"), 2.0) == []
    handoff.check_invariants()
    assert handoff.next_tick == 12.0
    assert handoff.tick(12.0) == [] and handoff.tick(12.1) == [ReleaseQuarantined(FILL)]


def test_a_failed_write_that_settles_in_quarantine_does_not_end_it() -> None:
    handoff = claimed()
    handoff.cancel()
    assert handoff.settled(settled(0, 1, "link down"), 1.0) == []
    assert handoff.tick(12.0) == [] and handoff.tick(12.1) == [ReleaseQuarantined(FILL)]


def test_a_failed_write_of_another_machine_may_land_after_it_has_settled() -> None:
    handoff = claimed(is_afar=True)
    local, retract = handoff.settled(settled(1, 1, "timeout"), 1.0)
    assert local == PrefillLocally(CloseCause.FAILED, "timeout", quarantined=True)
    assert isinstance(retract, Retract)
    assert handoff.settled_notice(SettledNotice(ID, 1, SECRET, 1, 1)) == []
    handoff.check_invariants()
    assert handoff.next_tick == 10.0 + LATE_BYTES_S
    assert handoff.tick(10.0 + LATE_BYTES_S) == []
    assert handoff.tick(10.1 + LATE_BYTES_S) == [ReleaseQuarantined(FILL)]
    complete = claimed(is_afar=True)
    complete.cancel()
    assert complete.settled(settled(1, 0, "cancelled"), 1.0) == [ReleaseQuarantined(FILL)]


def test_another_machine_has_the_grace_where_that_is_longer() -> None:
    grace_s = LATE_BYTES_S + 1.0
    handoff = DecodeHandoff(
        ID, 1, GRANT, deadline=20.0, grace_ms=round(grace_s * 1e3), layout=LAYOUT
    )
    handoff.published()
    handoff.claim(CLAIM, 0.0, is_afar=True)
    handoff.cancel()
    assert handoff.next_tick == 10.0 + grace_s


def test_a_lease_of_another_machine_that_runs_out_leaves_blocks_that_may_be_written() -> None:
    handoff = claimed(is_afar=True)
    assert handoff.next_tick == 12.0
    local, retract = handoff.tick(12.1)
    assert local == PrefillLocally(CloseCause.LEASE_EXPIRED, "lease expired", quarantined=True)
    assert isinstance(retract, Retract)
    assert handoff.tick(10.1 + LATE_BYTES_S) == [ReleaseQuarantined(FILL)]


def test_a_lost_notice_comes_again_with_the_settling() -> None:
    handoff = claimed()
    handoff.landed(landed((4, 1)), 1.0)
    notices = [(0, encode_landed(landed(*it))) for it in (((4, 1),), ((5, 2), (6, 3)))]
    actions = handoff.settled(Settled(ID, 1, 2, 0, notices=notices), 1.0)
    assert actions == [Verify(SPAN, ((5, 71, 2), (6, 80, 3)))]
    assert handoff.is_live and handoff.all_landed


def test_settling_with_too_little_written_ends_the_handoff_at_once() -> None:
    handoff = claimed()
    handoff.landed(landed((4, 1)), 1.0)
    [local] = handoff.settled(settled(3), 1.0)
    assert isinstance(local, PrefillLocally) and not local.quarantined
    assert local.cause is CloseCause.INCOMPLETE and "p.e1" in local.detail


def test_notices_that_are_lost_both_ways_cost_the_deadline_but_no_quarantine() -> None:
    handoff = claimed(now=15.0)
    handoff.landed(landed((4, 1)), 16.0)
    assert handoff.settled_notice(SettledNotice(ID, 1, SECRET, 3, 0)) == []
    assert handoff.peer_lost("p") == []
    assert handoff.tick(20.0) == [
        PrefillLocally(CloseCause.DEADLINE, "deadline", quarantined=False)
    ]


def test_notices_of_a_settling_that_reports_a_failure_are_not_taken() -> None:
    notices = [(0, encode_landed(landed((4, 1), (5, 2), (6, 3))))]
    for num_failed, error in ((1, "link down"), (0, "link down"), (1, "")):
        handoff = claimed()
        local, *_ = handoff.settled(Settled(ID, 1, 1, num_failed, error, notices), 1.0)
        assert isinstance(local, PrefillLocally) and local.quarantined is bool(num_failed)
        assert handoff.dropped == {}


def test_garbage_in_place_of_a_settling_s_notice_is_no_notice() -> None:
    handoff = claimed()
    [local] = handoff.settled(Settled(ID, 1, 1, 0, notices=[(0, b"garbage")]), 1.0)
    assert isinstance(local, PrefillLocally) and not local.quarantined


def test_layers_come_in_groups_and_all_of_them_must_be_proven() -> None:
    handoff = claimed()
    handoff.first_token(FIRST)
    lower, upper = Span(0, 0, range(3)), Span(0, 0, range(3, 4))
    blocks = ((4, 1), (5, 2), (6, 3))
    for span in (upper, lower):
        assert not handoff.all_landed
        [verify] = handoff.landed(landed(*blocks, layers=span.layers), 1.0)
        assert isinstance(verify, Verify) and verify.span == span
    assert handoff.all_landed and not handoff.all_proven
    answers = [
        handoff.verified(span, ordinal, True) for span in (lower, upper) for ordinal, _ in blocks
    ]
    assert answers == [[], [], [], [], [], [Admit(FIRST)]]
    handoff.check_invariants()


@pytest.mark.parametrize("layers", [range(1), range(1, 4), range(4)])
def test_layers_that_overlap_those_of_another_notice_end_the_handoff(layers: range) -> None:
    handoff = claimed()
    handoff.landed(landed((4, 1), layers=range(2)), 1.0)
    local, _ = handoff.landed(landed((4, 2), layers=layers), 1.0)
    assert isinstance(local, PrefillLocally) and local.quarantined
    assert local.cause is CloseCause.VIOLATION
    assert handoff.dropped == {DropCause.CONFLICT: 1}


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "pairs"),
    [
        (2, 1, [(0, 0), (1, 0)]),
        (1, 2, [(0, 0), (0, 1)]),
        (4, 2, [(0, 0), (1, 0), (2, 1), (3, 1)]),
    ],
)
def test_every_pair_of_ranks_that_share_heads_must_deliver(
    prefill_tp: int, decode_tp: int, pairs: list[tuple[int, int]]
) -> None:
    deliver(claimed(prefill_tp=prefill_tp, layout=replace(LAYOUT, tp_size=decode_tp)), pairs)


@pytest.mark.parametrize(
    ("num_kv_heads", "prefill_tp", "decode_tp", "pairs"),
    [
        (1, 1, 2, [(0, 0), (0, 1)]),
        (1, 2, 1, [(0, 0)]),
        (2, 4, 4, [(0, 0), (1, 1), (2, 2), (3, 3)]),
        (2, 4, 1, [(0, 0), (2, 0)]),
        (2, 2, 4, [(0, 0), (0, 1), (1, 2), (1, 3)]),
    ],
)
def test_every_replica_of_a_head_must_be_delivered_by_one_replica(
    num_kv_heads: int, prefill_tp: int, decode_tp: int, pairs: list[tuple[int, int]]
) -> None:
    layout = replace(LAYOUT, num_kv_heads=num_kv_heads, tp_size=decode_tp)
    deliver(claimed(prefill_tp=prefill_tp, layout=layout), pairs)


def deliver(handoff: DecodeHandoff, pairs: list[tuple[int, int]]) -> None:
    """Deliver everything over each of the pairs; only then is it admitted."""
    handoff.first_token(FIRST)
    actions = []
    for theirs, ours in pairs:
        assert not handoff.all_landed
        notice = landed((4, 1), (5, 2), (6, 3), rank=theirs)
        [verify] = handoff.landed(notice, 1.0, ours)
        assert verify == Verify(Span(theirs, ours, WHOLE), ((4, 70, 1), (5, 71, 2), (6, 80, 3)))
        for ordinal in (4, 5, 6):
            actions += handoff.verified(Span(theirs, ours, WHOLE), ordinal, True)
    assert actions == [Admit(FIRST)]


@pytest.mark.parametrize(
    ("rank", "decode_rank", "layers"),
    [
        (0, 1, WHOLE),
        (3, 0, WHOLE),
        (4, 2, WHOLE),
        (0, 2, WHOLE),
        (0, 0, range(2, 5)),
        (0, 0, range(2, 2)),
    ],
)
def test_a_span_that_the_writer_has_no_part_in_ends_the_handoff(
    rank: int, decode_rank: int, layers: range
) -> None:
    handoff = claimed(prefill_tp=4, layout=replace(LAYOUT, tp_size=2))
    local, _ = handoff.landed(landed((4, 1), rank=rank, layers=layers), 1.0, decode_rank)
    assert isinstance(local, PrefillLocally) and local.quarantined
    assert handoff.dropped == {DropCause.UNKNOWN_SPAN: 1}


def test_a_lost_peer_is_feared_until_it_is_proven_gone() -> None:
    handoff = claimed()
    assert handoff.peer_lost("someone else") == []
    local, _ = handoff.peer_lost("p")
    assert local == PrefillLocally(CloseCause.PEER_LOST, "p.e1 was lost", quarantined=True)
    assert handoff.peer_gone("p", "e0") == []
    assert handoff.peer_gone("p", "e1") == [ReleaseQuarantined(FILL)]
