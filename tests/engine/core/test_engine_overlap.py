"""What happens between the launch of a step and its collection."""

from types import SimpleNamespace

import pytest

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.schedule.sequence import PENDING
from tandem.runtime.errors import InternalError, ModelError
from tandem.runtime.wire.messages import StopConditions


def prompt(num_tokens: int, first: int = 100) -> list[int]:
    return list(range(first, first + num_tokens))


def spans(harness: SimpleNamespace, name: str) -> list[tuple[int, int]]:
    return [(s, e) for step in harness.runner.steps for who, s, e in step if who == name]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("overlap", [None, False, True])
def test_steps_overlap_on_a_gpu_unless_the_configuration_says_otherwise(
    fake: SimpleNamespace, kind: str, overlap: bool | None
) -> None:
    runner = fake.FakeRunner(8, 4)
    runner.device_kind = kind
    engine = Engine(EngineConfig(overlap=overlap), runner)
    assert engine.overlap == (kind == "gpu" if overlap is None else overlap)


def test_the_device_has_the_next_step_before_the_tokens_of_one_are_collected(
    fake: SimpleNamespace,
) -> None:
    harness = fake.make_harness()
    seq = fake.make_seq("r", prompt(5), 4)
    harness.engine.add(seq)
    harness.engine.launch()
    if fake.overlap:
        assert spans(harness, "r") == [(0, 5), (5, 6)]
        assert seq.token_ids[5:] == [PENDING, PENDING]
        assert (seq.num_computed_tokens, seq.num_launched_tokens, seq.in_flight) == (0, 6, 2)
    else:
        assert spans(harness, "r") == [(0, 5)]
        assert (seq.num_computed_tokens, seq.num_launched_tokens, seq.in_flight) == (0, 5, 1)
    harness.engine.launch()
    assert harness.engine.num_in_flight == 1 + fake.overlap
    (first,) = harness.engine.collect()
    assert seq.token_ids[5:] == first.token_ids + [PENDING] * fake.overlap
    assert harness.engine.num_in_flight == fake.overlap


def test_a_sequence_that_ends_by_length_is_computed_for_no_step_too_many(
    fake: SimpleNamespace,
) -> None:
    harness = fake.make_harness()
    for name, max_tokens, prefill_only in (("one", 1, False), ("five", 5, False), ("kv", 9, True)):
        seq = fake.make_seq(name, prompt(6), max_tokens, prefill_only=prefill_only)
        harness.engine.add(seq)
    harness.run()
    assert spans(harness, "one") == spans(harness, "kv") == [(0, 6)]
    assert spans(harness, "five") == [(0, 6), (6, 7), (7, 8), (8, 9), (9, 10)]


def test_a_stop_acts_one_step_late_and_nothing_past_it_is_shown(fake: SimpleNamespace) -> None:
    harness = fake.make_harness(script={8: fake.EOS})
    seq = fake.make_seq("r", prompt(6), 20)
    expected = fake.undisturbed(seq, {8: fake.EOS})
    harness.engine.add(seq)
    while not harness.finished:
        harness.step()
    assert spans(harness, "r")[-1] == ((8, 9) if fake.overlap else (7, 8))
    assert harness.engine.block_pool.num_held == (3 if fake.overlap else 0)
    assert seq.token_ids == prompt(6) + expected
    assert harness.engine.has_work == fake.overlap
    harness.run()
    assert harness.texts["r"] == expected and len(expected) == 2
    assert [output.finish_reason for output in harness.outputs] == [None, None, "stop"]
    harness.assert_all_free()


def test_a_remote_writer_gets_no_block_that_a_launched_step_still_writes(
    fake: SimpleNamespace,
) -> None:
    harness = fake.make_harness(num_blocks=8)
    gone = fake.make_seq("gone", prompt(26), 4)
    harness.engine.add(gone)
    harness.engine.launch()
    assert harness.engine.abort("gone")
    harness.engine.check_invariants()
    remote = fake.make_seq("remote", prompt(22, 500), 4)
    expected = fake.undisturbed(remote)
    assert harness.engine.reserve(remote) is None
    harness.take(harness.engine.collect())
    if fake.overlap:
        assert harness.engine.reserve(remote) is None
        harness.take(harness.engine.collect())
    assert harness.engine.reserve(remote) is not None
    harness.runner.fill(remote, 0, 22)
    harness.take([harness.engine.admit("remote", fake.FakeToken(expected[0]))])
    harness.run()
    assert harness.texts == {"remote": expected}


def test_an_aborted_request_can_come_again_while_its_step_runs(fake: SimpleNamespace) -> None:
    harness = fake.make_harness()
    harness.engine.add(fake.make_seq("r", prompt(9), 5))
    harness.engine.launch()
    harness.engine.abort("r")
    again = fake.make_seq("r", prompt(9, 300), 5)
    expected = fake.undisturbed(again)
    harness.engine.add(again)
    harness.run()
    assert harness.texts["r"] == expected
    harness.assert_all_free()


def test_nothing_is_shared_before_its_step_is_collected(fake: SimpleNamespace) -> None:
    harness = fake.make_harness()
    harness.engine.add(fake.make_seq("r", prompt(12), 8, prefill_only=True))
    follower = fake.make_seq("follower", prompt(12))
    harness.engine.launch()
    assert harness.engine.prefix_hit(follower) == 0
    assert harness.engine.load().num_waiting_tokens == 12
    harness.take(harness.engine.collect())
    assert harness.engine.prefix_hit(follower) == 8
    assert harness.finished["r"].num_computed_tokens == 12


def test_nobody_is_preempted_while_a_step_runs(fake: SimpleNamespace) -> None:
    harness = fake.make_harness(num_blocks=8)
    for i in range(2):
        harness.engine.add(fake.make_seq(f"r{i}", prompt(8, 100 * i), 24))
    expected = {f"r{i}": fake.undisturbed(harness.engine.scheduler.find(f"r{i}")) for i in range(2)}
    while harness.engine.load().num_preemptions == 0:
        num_in_flight = harness.engine.num_in_flight
        harness.engine.launch()
        harness.engine.check_invariants()
        if harness.engine.load().num_preemptions:
            assert num_in_flight == 0
        harness.take(harness.engine.collect())
    harness.run()
    assert harness.texts == expected


def test_a_step_that_fails_late_takes_nobody_else_with_it(
    fake: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    harness = fake.make_harness(max_num_batched_tokens=12)
    victim = fake.make_seq("victim", prompt(9), 9)
    harness.engine.add(victim)
    harness.runner.fail_later_with = RuntimeError("device lost")
    harness.engine.launch()
    other = fake.make_seq("other", prompt(9, 400), 9)
    expected = fake.undisturbed(other)
    harness.engine.add(other)
    harness.step()
    harness.run()
    assert isinstance(harness.finished["victim"].error, InternalError)
    assert harness.texts["victim"] == []
    assert harness.texts["other"] == expected
    assert "device lost" in caplog.text
    again = fake.make_seq("again", prompt(9))
    assert harness.engine.prefix_hit(again) == 0  # what the step left behind is shared by nobody
    harness.assert_all_free()


def test_a_failed_step_that_a_transfer_reads_keeps_its_blocks_until_they_are_dropped(
    fake: SimpleNamespace,
) -> None:
    harness = fake.make_harness(max_num_batched_tokens=8)
    harness.engine.add(fake.make_seq("r", prompt(20), 1, prefill_only=True))
    harness.runner.fail_later_with = error = ModelError("bad weights")
    harness.engine.launch()
    harness.take(harness.engine.collect())
    assert harness.finished["r"].error is error
    harness.engine.check_invariants()
    assert harness.engine.block_pool.num_held == 5
    harness.engine.abort("r")
    harness.engine.check_invariants()
    assert harness.engine.block_pool.num_held == 0 and not harness.runner.uncollected
    harness.assert_all_free()


def test_a_launch_that_fails_leaves_what_was_launched_before_alone(fake: SimpleNamespace) -> None:
    harness = fake.make_harness(max_num_batched_tokens=9)
    first = fake.make_seq("first", prompt(9), 1)
    expected = fake.undisturbed(first)
    harness.engine.add(first)
    harness.engine.launch()
    harness.engine.add(fake.make_seq("second", prompt(9, 300), 4))
    harness.runner.fail_with = ModelError("bad weights")
    harness.step()
    harness.step()
    assert harness.texts["first"] == expected
    assert isinstance(harness.finished["second"].error, ModelError)
    assert not harness.engine.has_work
    harness.assert_all_free()


def test_everything_can_be_failed_while_steps_run(fake: SimpleNamespace) -> None:
    harness = fake.make_harness(max_num_seqs=2)
    for i in range(3):
        harness.engine.add(fake.make_seq(f"r{i}", prompt(6), 5))
    harness.engine.launch()
    harness.engine.abort("r0")
    harness.take(harness.engine.fail_all(RuntimeError("a bug")))
    assert set(harness.finished) == {"r1", "r2"}
    assert harness.engine.num_in_flight == 0 and not harness.engine.has_work
    harness.engine.check_invariants()
    harness.assert_all_free()


def test_a_batch_row_goes_to_the_next_sequence_while_the_last_step_of_the_one_before_runs(
    fake: SimpleNamespace,
) -> None:
    harness = fake.make_harness(max_num_seqs=1, script={7: 499})
    stop = StopConditions(max_tokens=9, stop_token_ids=[499])
    seqs = [fake.make_seq(f"r{i}", prompt(6, 100 * i), stop=stop) for i in range(4)]
    expected = {seq.request_id: fake.undisturbed(seq, {7: 499}) for seq in seqs}
    for seq in seqs:
        harness.engine.add(seq)
    harness.run()
    assert harness.texts == expected
    assert {output.finish_reason for output in harness.finished.values()} == {"stop"}
    assert all(seq.batch_row == -1 for seq in seqs)


def test_tokens_that_are_not_known_name_no_block(fake: SimpleNamespace) -> None:
    harness = fake.make_harness()
    seq = fake.make_seq("r", prompt(6), 9)
    harness.engine.add(seq)
    harness.engine.launch()
    assert harness.engine.prefix_hit(seq) == 0 and len(seq.block_hashes) == 1
    harness.take(harness.engine.collect())
    assert harness.engine.prefix_hit(seq) == 4
