import pytest

from tandem.runtime.messages import (
    CancelHandoff,
    Claim,
    Claimed,
    ClaimRefused,
    FirstToken,
    SamplingParams,
    Settled,
)
from tandem.transfer.actions import (
    Abort,
    Admit,
    PrefillLocally,
    ReleaseQuarantined,
    Retract,
    Verify,
)
from tandem.transfer.handoff import DecodeHandoff, HandoffState, PrefillHandoff
from tandem.transfer.landed import Landed, SettledNotice, decode_landed, decode_settled

ID, SECRET = b"i" * 16, b"s" * 16
CLAIM = Claim(ID, 1, "p", "e1")
FIRST = FirstToken(ID, 1, token_id=42)
GRANT = Claimed(
    secret=SECRET,
    lease_ms=10_000,
    token_ids=b"",
    sampling=SamplingParams(),
    fill=[(4, 70), (5, 71), (6, 80)],
    cached_ordinals=[0, 1, 2, 3],
)
FILL = (70, 71, 80)


def decode_handoff(verify: bool = True) -> DecodeHandoff:
    """Deadline at 20 s, lease 10 s from the claim, grace 2 s."""
    return DecodeHandoff(ID, 1, GRANT, deadline=20.0, grace_ms=2000, verify=verify)


def claimed(now: float = 0.0) -> DecodeHandoff:
    handoff = decode_handoff()
    handoff.published()
    assert handoff.claim(CLAIM, now) == GRANT
    return handoff


def landed(*blocks: tuple[int, int], secret: bytes = SECRET, attempt: int = 1) -> Landed:
    return Landed(ID, attempt, secret, 0, 0, blocks)


def settled(num_completed: int = 1, num_failed: int = 0, error: str = "") -> Settled:
    return Settled(ID, 1, num_completed, num_failed, error)


def prefill_handoff() -> PrefillHandoff:
    """Lease until 10 s, margin 1 s."""
    return PrefillHandoff(ID, 1, GRANT, claim_sent_at=0.0, margin_ms=1000)


def test_a_sequence_is_admitted_when_all_blocks_are_proven_and_its_first_token_is_there() -> None:
    handoff = claimed()
    assert handoff.state is HandoffState.CLAIMED
    [verify] = handoff.landed(landed((4, 1), (6, 3)), 1.0)
    assert verify == Verify(((4, 70, 1), (6, 80, 3)))
    assert handoff.state is HandoffState.WRITING
    assert handoff.verified(4, True) == handoff.verified(6, True) == []
    assert handoff.first_token(FIRST) == []
    assert handoff.settled(settled(2)) == []
    assert handoff.landed(landed((5, 2)), 1.0) == [Verify(((5, 71, 2),))]
    assert not handoff.may_reuse_blocks
    assert handoff.verified(5, True) == [Admit(FIRST)]
    assert handoff.state is HandoffState.ADMITTED
    assert handoff.cancel() == handoff.tick(1000.0) == handoff.settled(settled()) == []
    handoff.check_invariants()


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
    assert handoff.tick(20.0) == [PrefillLocally("deadline", quarantined=False)]
    handoff = decode_handoff()
    assert handoff.fail("no queue") == [PrefillLocally("no queue", quarantined=False)]


def test_after_a_claim_blocks_are_held_until_p_settles() -> None:
    handoff = claimed()
    assert handoff.cancel() == [Abort(quarantined=True), Retract("p", CancelHandoff(ID, 1))]
    assert handoff.state is HandoffState.CLOSING
    assert not handoff.may_reuse_blocks
    assert handoff.landed(landed((4, 1)), 1.0) == handoff.first_token(FIRST) == []
    assert handoff.settled(settled(0, 0, "cancelled")) == [ReleaseQuarantined(FILL)]
    assert handoff.may_reuse_blocks
    assert handoff.settled(settled()) == []
    assert handoff.dropped == {"late": 2, "duplicate": 1}


def test_a_deadline_within_the_lease_holds_blocks_until_the_lease_and_its_grace_are_over() -> None:
    handoff = claimed(now=15.0)
    assert handoff.next_tick == 20.0
    local, retract = handoff.tick(20.0)
    assert local == PrefillLocally("deadline", quarantined=True)
    assert isinstance(retract, Retract)
    assert handoff.next_tick == 27.0
    assert handoff.tick(25.1) == handoff.tick(27.0) == []
    assert handoff.tick(27.1) == [ReleaseQuarantined(FILL)]
    assert handoff.next_tick is None


def test_a_lease_that_runs_out_first_leaves_clean_blocks() -> None:
    handoff = claimed()
    handoff.landed(landed((4, 1)), 1.0)
    assert handoff.tick(12.0) == []
    assert handoff.tick(12.1) == [PrefillLocally("lease expired", quarantined=False)]
    assert handoff.landed(landed((5, 1)), 12.2) == []


def test_a_notice_after_lease_and_grace_is_dropped_even_before_the_tick() -> None:
    handoff = claimed()
    assert handoff.landed(landed((4, 1)), 12.1) == []
    assert handoff.dropped == {"late": 1}


def test_the_same_claim_again_gets_the_same_answer_and_a_longer_lease() -> None:
    handoff = claimed()
    assert handoff.claim(CLAIM, 5.0) == GRANT
    assert handoff.tick(16.9) == []
    assert handoff.tick(17.1) == [PrefillLocally("lease expired", quarantined=False)]


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
    handoff.settled(settled(3))
    assert handoff.claim(CLAIM, 1.0) == ClaimRefused("stale")


def test_notices_with_another_secret_or_attempt_change_nothing() -> None:
    handoff = claimed()
    assert handoff.landed(landed((4, 9), secret=b"x" * 16), 1.0) == []
    assert handoff.landed(landed((4, 9), attempt=2), 1.0) == []
    assert handoff.settled_notice(SettledNotice(ID, 1, b"x" * 16, 0, 1)) == []
    assert handoff.settled(Settled(ID, 2, 0, 1)) == []
    assert handoff.first_token(FirstToken(ID, 2, token_id=1)) == []
    assert handoff.state is HandoffState.CLAIMED
    assert handoff.dropped == {"bad secret": 2, "stale": 3}


def test_nothing_is_believed_before_a_claim() -> None:
    handoff = decode_handoff()
    assert handoff.landed(landed((4, 1)), 1.0) == handoff.first_token(FIRST) == []
    assert handoff.settled(settled()) == []
    assert handoff.state is HandoffState.ALLOCATED
    assert handoff.claim(CLAIM, 1.0) == GRANT


def test_repeated_messages_are_counted_and_change_nothing() -> None:
    handoff = claimed()
    handoff.landed(landed((4, 1)), 1.0)
    handoff.first_token(FIRST)
    assert handoff.landed(landed((4, 1)), 1.0) == []
    assert handoff.first_token(FirstToken(ID, 1, token_id=43)) == []
    assert handoff.first == FIRST
    handoff.settled(settled(3))
    assert handoff.settled(settled(0, 1)) == []
    assert handoff.state is HandoffState.WRITING
    assert handoff.dropped == {"duplicate": 3}


@pytest.mark.parametrize("blocks", [((4, 2),), ((9, 1),), ((5, 1), (4, 2))])
def test_a_conflicting_checksum_or_an_ordinal_never_given_ends_the_handoff(
    blocks: tuple[tuple[int, int], ...],
) -> None:
    handoff = claimed()
    handoff.landed(landed((4, 1)), 1.0)
    local, _ = handoff.landed(landed(*blocks), 1.0)
    assert isinstance(local, PrefillLocally) and local.quarantined
    assert "p.e1" in local.reason


def test_a_checksum_that_does_not_match_ends_the_handoff_in_quarantine() -> None:
    handoff = claimed()
    handoff.landed(landed((4, 1), (5, 2)), 1.0)
    local, _ = handoff.verified(5, False)
    assert local == PrefillLocally("checksum of ordinal 5 from p.e1 does not match", True)
    assert handoff.verified(4, True) == []
    assert handoff.dropped == {"checksum": 1, "late": 1}


def test_a_failed_write_that_has_settled_leaves_clean_blocks() -> None:
    handoff = claimed()
    handoff.landed(landed((4, 1)), 1.0)
    assert handoff.settled(settled(1, 1)) == [
        PrefillLocally("1 writes of p.e1 failed", quarantined=False)
    ]


def test_a_lost_notice_costs_the_deadline_but_no_quarantine() -> None:
    handoff = claimed(now=15.0)
    handoff.landed(landed((4, 1)), 16.0)
    assert handoff.settled(settled(3)) == []
    assert handoff.tick(20.0) == [PrefillLocally("deadline", quarantined=False)]


def test_a_lost_peer_is_feared_until_it_is_proven_gone() -> None:
    handoff = claimed()
    assert handoff.peer_lost("someone else") == []
    local, _ = handoff.peer_lost("p")
    assert local == PrefillLocally("p.e1 was lost", quarantined=True)
    assert handoff.peer_gone("p", "e0") == []
    assert handoff.peer_gone("p", "e1") == [ReleaseQuarantined(FILL)]


def test_p_posts_each_ordinal_once_and_settles_when_all_have_landed() -> None:
    handoff = prefill_handoff()
    first = handoff.post([4, 5], 1.0)
    assert first is not None and first.remote_blocks == (70, 71)
    notice = decode_landed(handoff.landed_notice(first, [11, 12]))
    assert notice == Landed(ID, 1, SECRET, 0, 0, ((4, 11), (5, 12)))
    with pytest.raises(AssertionError, match="once"):
        handoff.post([5], 1.0)
    second = handoff.post([6], 1.0)
    assert second is not None
    notice = decode_landed(handoff.landed_notice(second, [13]))
    assert notice is not None and (notice.sequence_number, notice.num_writes) == (1, 2)
    handoff.completed(second)
    assert handoff.pinned and handoff.settled is None
    handoff.completed(first)
    assert handoff.settled == Settled(ID, 1, 2, 0)
    assert not handoff.pinned
    assert decode_settled(handoff.settled_notice()) == SettledNotice(ID, 1, SECRET, 2, 0)


def test_p_posts_nothing_close_to_the_end_of_its_lease() -> None:
    handoff = prefill_handoff()
    write = handoff.post([4], 8.9)
    assert write is not None and write.post_before == 9.0
    assert handoff.post([5], 8.9, longest_write_s=0.2) is None
    assert handoff.settled is None
    handoff.completed(write)
    assert handoff.settled == Settled(ID, 1, 1, 0, "the write lease is over")
    assert prefill_handoff().post([4], 6.4, longest_write_s=60.0) is not None
    assert prefill_handoff().post([4], 6.6, longest_write_s=60.0) is None


def test_p_settles_after_a_failure_only_when_the_siblings_have_ended() -> None:
    handoff = prefill_handoff()
    first, second = handoff.post([4], 1.0), handoff.post([5], 1.0)
    assert first is not None and second is not None
    handoff.failed(first, "link down")
    assert handoff.post([6], 1.0) is None
    assert handoff.settled is None
    handoff.completed(second)
    assert handoff.settled == Settled(ID, 1, 1, 1, "link down")
    handoff.check_invariants()


def test_p_that_stops_before_it_posted_anything_settles_at_once() -> None:
    handoff = prefill_handoff()
    handoff.stop("cancelled")
    assert handoff.post([4], 1.0) is None
    assert handoff.settled == Settled(ID, 1, 0, 0, "cancelled")
    notice = decode_settled(handoff.settled_notice())
    assert notice is not None and notice.num_failed == 1
