import pytest

from tandem.runtime.wire.handoff_messages import Claimed, Settled
from tandem.runtime.wire.messages import SamplingParams
from tandem.transfer.handoff.landed import Landed, SettledNotice, decode_landed, decode_settled
from tandem.transfer.handoff.prefill import PostedWrite, PrefillHandoff
from tandem.transfer.layout import RankPair, rank_pairs

ID, SECRET = b"i" * 16, b"s" * 16
GRANT = Claimed(
    secret=SECRET,
    lease_ms=10_000,
    token_ids=b"",
    sampling=SamplingParams(),
    fill=[(4, 70), (5, 71), (6, 80)],
    cached_ordinals=[0, 1, 2, 3],
)
WHOLE = range(4)  # of the model's layers


def prefill_handoff(prefill_tp: int = 1, decode_tp: int = 1) -> PrefillHandoff:
    """Lease until 10 s, margin 1 s."""
    return PrefillHandoff(
        ID,
        1,
        GRANT,
        claim_sent_at=0.0,
        margin_ms=1000,
        num_layers=len(WHOLE),
        rank_pairs=rank_pairs(4, prefill_tp, decode_tp),
    )


def complete(handoff: PrefillHandoff, *writes: PostedWrite) -> None:
    for write in writes:
        handoff.completed(write, b"notice %d" % write.sequence_number)
        handoff.check_invariants()


def test_p_posts_each_ordinal_once_and_settles_when_all_have_landed() -> None:
    handoff = prefill_handoff()
    [first] = handoff.post([4, 5], WHOLE, 1.0)
    assert first.remote_blocks == (70, 71)
    notice = decode_landed(handoff.landed_notice(first)([11, 12]))
    assert notice == Landed(ID, 1, SECRET, 0, 0, WHOLE, ((4, 11), (5, 12)))
    with pytest.raises(AssertionError, match="once"):
        handoff.post([5], WHOLE, 1.0)
    [second] = handoff.post([6], WHOLE, 1.0)
    notice = decode_landed(handoff.landed_notice(second)([13]))
    assert notice is not None and notice.sequence_number == 1
    complete(handoff, second)
    assert handoff.pinned
    with pytest.raises(AssertionError, match="can still land"):
        handoff.settled()
    complete(handoff, first)
    assert not handoff.pinned
    notices = [(0, b"notice 1"), (0, b"notice 0")]
    assert handoff.settled() == Settled(ID, 1, 2, 0, notices=notices)
    assert decode_settled(handoff.settled_notice()) == SettledNotice(ID, 1, SECRET, 2, 0)


def test_blocks_are_ready_layer_by_layer_and_below_what_is_computed() -> None:
    handoff = prefill_handoff()
    assert handoff.ready(4, [4]) == {}  # the decode worker holds these
    assert handoff.ready(5, [4]) == {WHOLE: [4]}
    handoff.post([4], WHOLE, 1.0)
    assert handoff.ready(7, [2]) == {range(2): [5, 6]}
    handoff.post([5], range(2), 1.0)
    assert handoff.ready(7, [2]) == {range(2): [6]}
    assert handoff.ready(7, [4]) == {range(2, 4): [5], WHOLE: [6]}
    with pytest.raises(AssertionError, match="once"):
        handoff.post([6], range(2, 4), 1.0)


def test_layers_of_each_kind_of_block_are_ready_for_themselves() -> None:
    handoff = prefill_handoff()
    assert handoff.ready(6, [4, 0]) == {WHOLE: [4]}
    assert handoff.ready(7, [3, 1]) == {range(3): [4, 6], range(1): [5]}
    handoff.post([4, 6], range(3), 1.0)
    handoff.post([5], range(1), 1.0)
    assert handoff.ready(7, [3, 1]) == {}
    assert handoff.ready(7, [4, 4]) == {range(3, 4): [4, 6], range(1, 4): [5]}


def test_groups_of_layers_are_pinned_until_the_last_is_written() -> None:
    handoff = prefill_handoff()
    [lower] = handoff.post([4, 5, 6], range(3), 1.0)
    complete(handoff, lower)
    assert handoff.pinned and handoff.has_unposted
    [upper] = handoff.post([4, 5, 6], range(3, 4), 1.0)
    notice = decode_landed(handoff.landed_notice(upper)([1, 2, 3]))
    assert notice is not None and notice.layers == range(3, 4)
    assert handoff.pinned and not handoff.has_unposted
    complete(handoff, upper)
    assert not handoff.pinned


def test_every_block_goes_over_every_stream() -> None:
    handoff = prefill_handoff(prefill_tp=2, decode_tp=4)
    writes = handoff.post([4, 5, 6], WHOLE, 1.0)
    assert [write.ranks for write in writes] == [
        RankPair(0, 0, range(1), range(1)),
        RankPair(0, 1, range(1, 2), range(1)),
        RankPair(1, 2, range(1), range(1)),
        RankPair(1, 3, range(1, 2), range(1)),
    ]
    assert [write.sequence_number for write in writes] == [0, 1, 2, 3]
    complete(handoff, *writes[:3])
    assert handoff.pinned
    complete(handoff, writes[3])
    assert [rank for rank, _ in handoff.settled().notices] == [0, 1, 2, 3]


def test_p_posts_nothing_close_to_the_end_of_its_lease() -> None:
    handoff = prefill_handoff()
    [write] = handoff.post([4], WHOLE, 8.9)
    assert write.post_before == 9.0
    assert handoff.post([5], WHOLE, 8.9, longest_write_s=0.2) == []
    assert prefill_handoff().post([4], WHOLE, 9.0) == []
    assert handoff.pinned
    complete(handoff, write)
    assert not handoff.pinned
    assert handoff.settled().error == "the write lease is over"
    assert handoff.settled().num_completed == 1


def test_writes_that_took_long_shorten_the_lease_by_a_quarter_at_most() -> None:
    [write] = prefill_handoff().post([4], WHOLE, 6.4, longest_write_s=60.0)
    assert write.post_before == 6.5
    assert prefill_handoff().post([4], WHOLE, 6.6, longest_write_s=60.0) == []


def test_p_settles_after_a_failure_only_when_the_siblings_have_ended() -> None:
    handoff = prefill_handoff()
    [first] = handoff.post([4], WHOLE, 1.0)
    [second] = handoff.post([5], WHOLE, 1.0)
    handoff.failed(first, "link down")
    assert handoff.post([6], WHOLE, 1.0) == []
    assert handoff.pinned
    complete(handoff, second)
    assert not handoff.pinned
    notices = [(0, b"notice 1")]
    assert handoff.settled() == Settled(ID, 1, 1, 1, "link down", notices)
    handoff.check_invariants()


def test_both_planes_count_the_writes_that_failed() -> None:
    handoff = prefill_handoff()
    for write in handoff.post([4], WHOLE, 1.0) + handoff.post([5], WHOLE, 1.0):
        handoff.failed(write, "link down")
    assert handoff.settled().num_failed == 2
    notice = decode_settled(handoff.settled_notice())
    assert notice is not None and (notice.num_completed, notice.num_failed) == (0, 2)


def test_p_that_stops_before_it_posted_anything_settles_at_once() -> None:
    handoff = prefill_handoff()
    handoff.stop("cancelled")
    assert handoff.post([4], WHOLE, 1.0) == []
    assert handoff.settled() == Settled(ID, 1, 0, 0, "cancelled")
    notice = decode_settled(handoff.settled_notice())
    assert notice is not None and notice.num_failed == 1


def test_the_first_reason_to_stop_is_the_one_that_is_told() -> None:
    handoff = prefill_handoff()
    handoff.stop("cancelled")
    handoff.stop("and the link is down")
    assert handoff.settled({"computed": 3.0}) == Settled(
        ID, 1, 0, 0, "cancelled", timeline_ms={"computed": 3.0}
    )
