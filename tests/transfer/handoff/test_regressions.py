"""What other engines got wrong in moving KV: one test for each row of the protocol's table.

Played out in the world of the schedules, whose every step checks all invariants. The rows that are
about the queue, the peers or the reactor have their tests beside those.
"""

import random

import pytest

from tandem.runtime.messages import FirstToken, Settled
from tandem.transfer.handoff.causes import CloseCause, DropCause
from tandem.transfer.handoff.decode import HandoffState
from tandem.transfer.handoff.landed import Landed, SettledNotice, decode_settled
from tests.transfer.schedules.decode import GRACE_MS
from tests.transfer.schedules.memory import LoopbackMemory
from tests.transfer.schedules.stage import DEADLINE_S, LEASE_S, Stage

NUM_FLIPS = 100


def test_a_prefix_that_both_sides_have_in_part_shifts_no_block() -> None:
    stage = Stage()
    stage.prefill(stage.run_of(stage.handoff(num_blocks=3)))
    stage.finish(stage.decoding[0])
    case = stage.handoff(num_blocks=4)  # the same prompt, one block longer
    assert case.machine.grant.cached_ordinals == [0, 1]
    job = stage.run_of(case, steps=(1, 3, 4))  # other steps than the decode worker's prefix
    assert stage.post(job) == []
    [first], [second] = stage.post(job), stage.post(job)
    assert (first.posted.ordinals, second.posted.ordinals) == ((2,), (3,))
    assert first.posted.remote_blocks + second.posted.remote_blocks == tuple(case.blocks[2:])
    stage.deliver(second)
    stage.deliver(first)
    stage.hear_token(job)  # admits, if each block holds its own ordinal
    assert case.place == "decoding"
    stage.settle(job)
    stage.must_balance()


def test_blocks_of_a_request_that_was_aborted_while_pushed_to_go_to_nobody() -> None:
    stage = Stage()
    case = stage.handoff()
    job = stage.run_of(case)
    [write] = stage.post(job)
    stage.cancel(case)
    while stage.start_case(1, 1, LEASE_S, DEADLINE_S):
        assert not set(stage.cases[-1].blocks) & set(case.fill)
    assert stage.pool.num_quarantined == 4 and stage.pool.num_free == 0
    stage.deliver(write)  # late, and where nobody reads
    assert job.machine is not None
    job.machine.stop("retracted")
    stage.settle(job)
    assert stage.pool.num_quarantined == 0 and stage.pool.num_free == 4


def test_a_write_deferred_past_its_lease_is_not_posted_and_its_source_was_not_reused() -> None:
    stage = Stage()
    case = stage.handoff()
    job = stage.run_of(case)
    stage.compute(job, backwards=False, post=True)
    held = set(job.source.values())
    stage.now += LEASE_S  # the prefill worker was stopped; the deadline is later
    assert job.machine is not None and job.machine.pinned
    other = stage.run_of(stage.handoff(1, 5), steps=(5,))
    assert other.source and not held & set(other.source.values())
    stage.transfer(job, fails=False)
    assert not stage.writes and not job.machine.pinned
    stage.compute(job, backwards=False, post=True)
    assert not job.to_post
    settled = stage.settle(job)
    assert settled.num_failed == 1 and settled.error
    assert case.place == "gone" and case.machine.close_cause is CloseCause.FAILED


def test_a_write_that_cannot_start_ends_the_wait_at_once() -> None:
    stage = Stage()
    case = stage.handoff()
    job = stage.run_of(case)
    assert stage.post(job, fails=True) == []
    settled = stage.settle(job)
    assert (settled.num_completed, settled.num_failed, settled.error) == (0, 1, "link down")
    assert case.machine.state is HandoffState.CLOSED and case.place == "gone"
    stage.must_balance()


def test_siblings_of_a_failed_write_keep_the_blocks_of_both_sides() -> None:
    stage = Stage()
    case = stage.handoff()
    job = stage.run_of(case)
    [first], [second] = stage.post(job), stage.post(job)
    stage.fail_write(first)
    stage.end_write(first, fails=True)
    assert job.machine is not None and job.machine.pinned
    with pytest.raises(AssertionError, match="can still land"):
        job.machine.settled()
    assert case.place == "fill"
    stage.deliver(second)
    stage.settle(job)
    assert case.place == "gone"
    stage.must_balance()


@pytest.mark.parametrize("num_posted", [0, 1])
def test_blocks_of_a_worker_that_dies_without_a_word_come_back_by_themselves(
    num_posted: int,
) -> None:
    stage = Stage()
    case = stage.handoff()
    job = stage.run_of(case)
    writes = [write for _ in range(num_posted) for write in stage.post(job)]
    stage.kill(job.process)
    for write in writes:
        stage.land(write)  # what it had posted
    stage.now += DEADLINE_S
    stage.tick(case)
    assert case.place == "gone" and not case.machine.dropped  # lease and grace were over before
    stage.must_balance()


def test_a_lost_worker_s_blocks_stay_in_quarantine_until_lease_and_grace_are_over() -> None:
    stage = Stage()
    case = stage.handoff()
    job = stage.run_of(case)
    stage.post(job)
    stage.kill(job.process)
    stage.lose_peer(case, job.process.name)
    assert case.place == "quarantine" and len(stage.decoding) == 1
    stage.now += LEASE_S + GRACE_MS / 1e3
    stage.tick(case)
    assert case.place == "quarantine"
    stage.tear_down(job.process)
    stage.now += 1e-3
    stage.tick(case)
    stage.must_balance()


def test_a_request_rejected_before_it_was_admitted_strands_no_block() -> None:
    stage = Stage()
    first, second, third = (stage.handoff(prompt, 4) for prompt in (0, 1, 2))
    stage.cancel(first)  # nobody has claimed it
    assert first.place == "gone"
    stage.give_up(second)
    assert second.place == "gone"
    job = stage.run_of(third)
    assert job.machine is not None
    job.machine.stop("no room for the prompt")
    stage.settle(job)
    assert third.place == "gone"
    stage.must_balance()


def test_a_worker_that_restarted_under_its_name_has_no_part_in_what_it_had_claimed() -> None:
    stage = Stage()
    case = stage.handoff()
    old = stage.run_of(case)
    [write] = stage.post(old)
    stage.kill(old.process)
    restarted = stage.processes[0]
    assert restarted.name == old.process.name and restarted.who != old.process.who
    refused = stage.run_of(case)
    assert refused.ended and refused.machine is None
    assert case.machine.claimant == old.process.who
    stage.lose_peer(case, old.process.name)
    restarted.gone = True  # its end says nothing of the write that is under way
    stage.lose_for_good(case, restarted)
    assert case.place == "quarantine"
    stage.land(write)
    stage.tear_down(old.process)
    stage.lose_for_good(case, old.process)
    assert case.place == "gone"
    stage.must_balance()


def test_a_worker_that_was_refused_does_not_settle_for_the_claimant() -> None:
    stage = Stage()
    case = stage.handoff()
    job = stage.run_of(case)
    [write] = stage.post(job)
    stage.processes[0].frozen_until = stage.now + 0.1  # so that its ticket comes to another
    other = stage.take_ticket(stage.processes[1], case, [(4, (2,))])
    assert other is not None
    stage.claim(other, 1)
    stage.hear_nothing(other)  # it was refused, and the answer was lost
    body = stage.sent("settled", other).body
    assert isinstance(body, Settled)
    stage.hear_settled(case, body, other)
    assert case.place == "fill" and case.machine.dropped[DropCause.NOT_THE_CLAIMANT] == 1
    stage.now += 0.1
    stage.deliver(write)
    stage.prefill(job)
    assert case.place == "decoding"


def test_a_ticket_that_comes_again_to_its_own_worker_is_not_run_again() -> None:
    stage = Stage()
    case = stage.handoff()
    first = stage.run_of(case, steps=(4,))
    [write] = stage.post(first)
    stage.land(write)
    stage.end_write(write, fails=False)
    stage.hear_token(first)
    stage.wind_up(first)  # and no notice of the write or of this has arrived yet
    second = stage.run_of(case, steps=(4,))
    assert second.ended and second.machine is None
    stage.hear_notices()
    assert case.place == "decoding"


@pytest.mark.parametrize("ordinal", [0, 1, 6, 2**32 - 1])
def test_a_block_that_was_not_granted_is_nowhere_applied(ordinal: int) -> None:
    stage = Stage()
    stage.prefill(stage.run_of(stage.handoff(num_blocks=3)))
    stage.finish(stage.decoding[0])
    case = stage.handoff()
    stage.run_of(case)
    machine = case.machine
    assert machine.grant.cached_ordinals == [0, 1]
    case.is_suspect = True
    lie = Landed(machine.handoff_id, 1, machine.grant.secret, 0, 0, range(2), ((ordinal, 1),))
    stage.hear_landed(case, lie, 0)
    assert case.place == "quarantine" and not stage.checks
    assert machine.dropped[DropCause.UNKNOWN_ORDINAL] == 1


def test_a_reference_of_another_attempt_or_of_another_handoff_is_not_applied() -> None:
    stage = Stage()
    case, other = stage.handoff(0), stage.handoff(1)
    stage.run_of(case)
    stage.run_of(other, 1)
    handoff_id, secret = case.machine.handoff_id, case.machine.grant.secret
    block = ((0, 1),)
    for attempt, known in ((0, secret), (2, secret), (1, other.machine.grant.secret)):
        notice = Landed(handoff_id, attempt, known, 0, 0, range(2), block)
        stage.hear_landed(case, notice, 0, genuine=False)
        settled = SettledNotice(handoff_id, attempt, known, 1, 1)
        stage.hear_settled_notice(case, settled, None)
    assert case.machine.state is HandoffState.CLAIMED
    assert case.machine.dropped == {DropCause.STALE: 4, DropCause.BAD_SECRET: 2}


def test_a_completion_that_comes_twice_changes_nothing() -> None:
    stage = Stage()
    case = stage.handoff()
    job = stage.run_of(case)
    writes = stage.post(job) + stage.post(job)
    for write in writes:
        stage.land(write)
        stage.inbox *= 2
        stage.hear_notices()
        stage.end_write(write, fails=False)
    first = stage.sent("first", job).body
    stage.wind_up(job)
    settled = stage.sent("settled", job).body
    assert isinstance(first, FirstToken) and isinstance(settled, Settled)
    for _ in range(2):
        stage.hear_first(case, first)
        stage.hear_settled(case, settled, job)
    assert case.place == "decoding" and case.num_emitted == 1
    stage.must_balance()


def test_one_lost_notice_comes_again_with_the_settling() -> None:
    stage = Stage()
    case = stage.handoff()
    job = stage.run_of(case)
    for write in stage.post(job) + stage.post(job):
        stage.land(write)
        stage.inbox.clear()
        stage.end_write(write, fails=False)
    stage.hear_token(job)
    stage.settle(job)
    stage.verify_all()
    assert case.place == "decoding"
    stage.must_balance()


def test_a_settling_lost_on_the_request_plane_comes_as_a_notice() -> None:
    stage = Stage()
    case = stage.handoff()
    job = stage.run_of(case)
    stage.cancel(case)
    assert job.machine is not None
    job.machine.stop("retracted")
    stage.wind_up(job)
    notice = decode_settled(stage.sent("settled", job).notice)
    assert notice is not None
    stage.hear_settled_notice(case, notice, job)
    assert case.place == "gone"
    stage.must_balance()


def test_a_ticket_whose_work_is_believed_done_ends_by_its_deadline() -> None:
    stage = Stage()
    case = stage.handoff()  # and somebody's late acknowledgement takes it from the queue
    stage.now += DEADLINE_S
    stage.tick(case)
    assert case.machine.close_cause is CloseCause.DEADLINE and case.place == "gone"
    refused = stage.run_of(case)  # should it come to somebody after all
    assert refused.ended
    stage.must_balance()


def test_a_bit_that_flips_on_the_way_is_caught_wherever_it_is() -> None:
    draw = random.Random(0)
    for _ in range(NUM_FLIPS):
        stage = Stage(LoopbackMemory())
        case = stage.handoff(num_blocks=2)
        job = stage.run_of(case, steps=(2,))
        [write] = stage.post(job)
        stage.land(write)
        block_id, position = draw.choice(case.fill), draw.randrange(stage.words.num_words)
        word = stage.words.get(0, block_id)[position]
        stage.words.put(0, block_id, position, [word ^ 1 << draw.randrange(63)])
        case.is_suspect = True
        stage.hear_token(job)
        stage.hear_notices()
        assert case.place == "quarantine" and case.machine.dropped[DropCause.CHECKSUM] == 1
        stage.end_write(write, fails=False)
        stage.settle(job)
        stage.must_balance()
