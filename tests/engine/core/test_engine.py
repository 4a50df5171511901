import random
from types import SimpleNamespace

import pytest

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.schedule.sequence import Sequence, SequenceStatus
from tandem.runtime.errors import (
    CapacityError,
    ContextLengthError,
    InternalError,
    InvalidRequestError,
    ModelError,
    NotFoundError,
)
from tandem.runtime.wire.messages import StopConditions


def prompt(num_tokens: int, first: int = 100) -> list[int]:
    return list(range(first, first + num_tokens))


def random_prompts(count: int, max_tokens: int) -> list[list[int]]:
    rng = random.Random(count)
    lengths = [rng.randint(1, max_tokens) for _ in range(count)]
    return [[rng.randrange(3) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_batched_tokens": 8, "prefill_chunk_tokens": 3},
        {"num_blocks": 14},
        {"num_blocks": 14, "enable_prefix_cache": False, "prefill_chunk_tokens": 5},
        {"max_num_seqs": 1},
        {"block_size": 1, "num_blocks": 60},
        {"num_blocks": 14, "max_num_seqs": 5, "max_num_batched_tokens": 5},
    ],
    ids=str,
)
def test_the_text_depends_on_no_scheduling(fake: SimpleNamespace, config: dict[str, int]) -> None:
    harness = fake.make_harness(**config)
    seqs = [
        fake.make_seq(f"r{i}", tokens, 1 + i % 23, seed=i % 3)
        for i, tokens in enumerate(random_prompts(40, 25))
    ]
    expected = {seq.request_id: fake.undisturbed(seq) for seq in seqs}
    for i, seq in enumerate(seqs):
        harness.engine.add(seq)
        if i % 3 == 0:
            harness.step()
    harness.run()
    assert harness.texts == expected
    assert {output.finish_reason for output in harness.finished.values()} == {"length"}
    harness.assert_all_free()
    if config.get("num_blocks") == 14 and "max_num_seqs" not in config:
        assert harness.engine.load().num_preemptions > 0


def test_a_stop_token_ends_the_text_and_is_not_in_it(fake: SimpleNamespace) -> None:
    harness = fake.make_harness(script={10: fake.EOS, 11: 499, 30: fake.EOS})
    stops = {
        "eos": StopConditions(max_tokens=50),
        "token": StopConditions(max_tokens=50, stop_token_ids=[499], ignore_eos=True),
        "minimum": StopConditions(max_tokens=50, min_tokens=6),
        "ignored": StopConditions(max_tokens=25, ignore_eos=True),
    }
    seqs = [fake.make_seq(name, prompt(6), stop=stop) for name, stop in stops.items()]
    for seq in seqs:
        harness.engine.add(seq)
    harness.run()
    found = {
        name: (len(harness.texts[name]), output.finish_reason, output.stop_token_id)
        for name, output in harness.finished.items()
    }
    assert found == {
        "eos": (4, "stop", fake.EOS),
        "token": (5, "stop", 499),
        "minimum": (24, "stop", fake.EOS),
        "ignored": (25, "length", None),
    }
    assert fake.EOS in harness.texts["ignored"]
    harness.assert_all_free()


def test_logprobs_come_one_per_token(fake: SimpleNamespace) -> None:
    harness = fake.make_harness(script={6: fake.EOS})
    harness.runner.logprobs = True
    harness.engine.add(fake.make_seq("r", prompt(4)))
    harness.run()
    assert [len(output.logprobs or []) for output in harness.outputs] == [1, 1, 0]
    assert harness.outputs[-1].stop_token_id == fake.EOS


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "error", "numbers"),
    [
        (0, 4, InvalidRequestError, ["empty"]),
        (4, -1, InvalidRequestError, ["max_tokens is -1"]),
        (90, 11, ContextLengthError, ["90", "11", "101", "100"]),
        (70, 30, CapacityError, ["100", "25", "20"]),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(
    fake: SimpleNamespace,
    num_tokens: int,
    max_tokens: int,
    error: type[Exception],
    numbers: list[str],
) -> None:
    harness = fake.make_harness(num_blocks=20, max_model_len=100)
    seq = fake.make_seq("r", prompt(num_tokens), max_tokens)
    for accept in (harness.engine.add, harness.engine.reserve):
        with pytest.raises(error) as caught:
            accept(seq)
        assert type(caught.value) is error
        assert all(number in str(caught.value) for number in numbers)
    assert not harness.engine.has_work


def test_a_sequence_that_just_fits_the_whole_pool_runs(fake: SimpleNamespace) -> None:
    harness = fake.make_harness(num_blocks=5)
    assert harness.engine.max_model_len == 20
    seq = fake.make_seq("r", prompt(11), 9)
    expected = fake.undisturbed(seq)
    harness.engine.add(seq)
    harness.run()
    assert harness.texts["r"] == expected


def test_a_request_id_is_accepted_once(fake: SimpleNamespace) -> None:
    harness = fake.make_harness()
    harness.engine.add(fake.make_seq("r", prompt(4)))
    with pytest.raises(InvalidRequestError, match="in the engine already"):
        harness.engine.add(fake.make_seq("r", prompt(4)))


def test_a_prefill_only_sequence_reports_progress_and_keeps_its_blocks(
    fake: SimpleNamespace,
) -> None:
    harness = fake.make_harness(max_num_batched_tokens=8)
    seq = fake.make_seq("r", prompt(20), 1, prefill_only=True)
    (first,) = fake.undisturbed(seq)
    harness.engine.add(seq)
    harness.run()
    assert [output.num_computed_tokens for output in harness.outputs] == [8, 16, 20]
    assert [output.token_ids for output in harness.outputs] == [[], [], [first]]
    assert harness.finished["r"].finish_reason == "length"
    assert harness.engine.block_pool.num_held == 5
    assert harness.engine.abort("r")
    assert not harness.engine.abort("r")
    harness.engine.check_invariants()
    harness.assert_all_free()


def test_a_prefill_only_sequence_hands_over_even_an_end_of_text(fake: SimpleNamespace) -> None:
    harness = fake.make_harness(script={20: fake.EOS})
    harness.engine.add(fake.make_seq("r", prompt(20), 1, prefill_only=True))
    harness.run()
    assert harness.texts["r"] == [fake.EOS]


def prefilled(fake: SimpleNamespace, harness: SimpleNamespace, seq: Sequence) -> SimpleNamespace:
    """Reserve, let a remote worker fill the blocks, and return its first token."""
    first = fake.undisturbed(seq)[0]
    assert harness.engine.reserve(seq) is not None
    cached = seq.num_reserved_cached_blocks * harness.runner.block_size
    harness.runner.fill(seq, cached, seq.num_prompt_tokens)
    return fake.FakeToken(first)


def test_a_remote_prefill_goes_on_from_its_second_token(fake: SimpleNamespace) -> None:
    harness = fake.make_harness()
    harness.engine.add(fake.make_seq("local", prompt(10), 3))
    harness.run()
    seq = fake.make_seq("remote", prompt(22), 9)
    expected = fake.undisturbed(seq)
    first = prefilled(fake, harness, seq)
    assert not harness.engine.has_work
    assert harness.engine.load().num_remote == 1
    harness.take([harness.engine.admit("remote", first)])
    assert harness.outputs[-1].token_ids == expected[:1]
    assert harness.outputs[-1].num_cached_tokens == 8
    harness.run()
    assert harness.texts["remote"] == expected
    again = fake.make_seq("again", prompt(22))
    assert harness.engine.prefix_hit(again) == 20  # what came from remote is shared as well
    harness.assert_all_free()


def test_a_reservation_names_every_block_of_the_prompt_by_its_ordinal(
    fake: SimpleNamespace,
) -> None:
    harness = fake.make_harness()
    harness.engine.add(fake.make_seq("local", prompt(10), 3))
    harness.run()
    seq = fake.make_seq("remote", prompt(22), 9)
    reservation = harness.engine.reserve(seq)
    assert reservation.cached_ordinals == [0, 1]
    assert reservation.num_cached_tokens == 8
    assert [ordinal for ordinal, _ in reservation.fill] == [2, 3, 4, 5]
    assert [block_id for _, block_id in reservation.fill] == seq.block_table[2:]


@pytest.mark.parametrize(
    ("max_tokens", "script", "reason"), [(1, {}, "length"), (5, {9: 501}, "stop")]
)
def test_a_first_token_from_remote_may_be_the_last(
    fake: SimpleNamespace, max_tokens: int, script: dict[int, int], reason: str
) -> None:
    harness = fake.make_harness(script=script)
    seq = fake.make_seq("remote", prompt(9), max_tokens)
    assert harness.engine.reserve(seq) is not None
    output = harness.engine.admit("remote", fake.FakeToken(script.get(9, 3)))
    assert output.finish_reason == reason
    assert not harness.engine.has_work
    harness.engine.check_invariants()
    harness.assert_all_free()


@pytest.mark.parametrize("quarantined", [False, True])
@pytest.mark.parametrize("has_first", [False, True])
def test_a_remote_prefill_that_fails_is_done_locally_with_the_same_text(
    fake: SimpleNamespace, quarantined: bool, has_first: bool
) -> None:
    harness = fake.make_harness(num_blocks=24)
    seq = fake.make_seq("remote", prompt(22), 9)
    expected = fake.undisturbed(seq)
    reservation = harness.engine.reserve(seq)
    filled = [block_id for _, block_id in reservation.fill]
    first = fake.FakeToken(expected[0]) if has_first else None
    output = harness.engine.prefill_locally("remote", quarantined=quarantined, first=first)
    assert (output is None) == (not has_first)
    if output is not None:
        harness.take([output])
    harness.engine.check_invariants()
    harness.step()
    assert quarantined == (not set(filled) & set(seq.block_table))
    if quarantined:
        for block_id in filled:  # the late write lands
            for offset in range(harness.runner.block_size):
                harness.runner.slots[block_id * harness.runner.block_size + offset] = 666
    harness.run()
    assert harness.texts["remote"] == expected
    if quarantined:
        harness.engine.release_quarantined(filled)
    harness.assert_all_free()


def test_a_failed_remote_prefill_whose_first_token_was_the_last_ends_at_once(
    fake: SimpleNamespace,
) -> None:
    harness = fake.make_harness()
    assert harness.engine.reserve(fake.make_seq("remote", prompt(9), 1)) is not None
    output = harness.engine.prefill_locally("remote", quarantined=False, first=fake.FakeToken(3))
    assert output is not None and output.finish_reason == "length"
    assert not harness.engine.has_work
    harness.assert_all_free()


def test_a_reservation_that_is_gone_is_not_found(fake: SimpleNamespace) -> None:
    harness = fake.make_harness()
    harness.engine.add(fake.make_seq("local", prompt(4)))
    for request_id in ("local", "unknown"):
        with pytest.raises(NotFoundError, match=request_id):
            harness.engine.admit(request_id, fake.FakeToken(1))
        with pytest.raises(NotFoundError, match=request_id):
            harness.engine.prefill_locally(request_id, quarantined=True)


@pytest.mark.parametrize("quarantined", [False, True])
@pytest.mark.parametrize(
    "state", ["waiting", "prefilling", "decoding", "preempted", "remote", "exported", "unknown"]
)
def test_a_sequence_can_be_aborted_in_any_state(
    fake: SimpleNamespace, state: str, quarantined: bool
) -> None:
    harness = fake.make_harness(
        num_blocks=8 if state == "preempted" else 64, max_num_batched_tokens=6, max_model_len=32
    )
    other = fake.make_seq("other", prompt(6), 26)
    expected = fake.undisturbed(other)
    harness.engine.add(other)
    harness.step()
    seq = fake.make_seq("victim", prompt(14, 300), 10, prefill_only=state == "exported")
    if state == "remote":
        assert harness.engine.reserve(seq) is not None
    elif state != "unknown":
        harness.engine.add(seq)
    reached = {
        "prefilling": lambda: 0 < seq.num_computed_tokens < 14,
        "decoding": lambda: seq.num_generated_tokens > 2,
        "preempted": lambda: seq.num_generated_tokens > 0 and not seq.block_table,
        "exported": lambda: seq.status is SequenceStatus.FINISHED,
    }.get(state, lambda: True)
    while not reached():
        harness.step()
    assert harness.engine.abort("victim", quarantined=quarantined) == (state != "unknown")
    assert not harness.engine.abort("victim")
    harness.engine.check_invariants()
    num_outputs = len([output for output in harness.outputs if output.request_id == "victim"])
    harness.run()
    assert harness.texts["other"] == expected
    assert num_outputs == len([o for o in harness.outputs if o.request_id == "victim"])
    num_quarantined = 4 if quarantined and state == "remote" else 0
    assert harness.engine.load().num_quarantined_blocks == num_quarantined
    assert harness.engine.block_pool.num_held == 0


def test_a_device_that_is_lost_for_a_while_ends_its_sequences_and_not_the_engine(
    fake: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    harness = fake.make_harness(max_num_seqs=2)
    exporting = fake.make_seq("exporting", prompt(6), 1, prefill_only=True)
    survivor = fake.make_seq("survivor", prompt(9, 200), 5)
    expected = fake.undisturbed(survivor)
    for seq in (exporting, fake.make_seq("decoding", prompt(5, 300), 5), survivor):
        harness.engine.add(seq)
    for _ in range(3):  # together, then each alone
        harness.runner.fail_with = RuntimeError("device lost")
        harness.step()
    assert set(harness.finished) == {"exporting", "decoding"}
    for output in harness.finished.values():
        assert output.finish_reason == "error"
        assert isinstance(output.error, InternalError)
        assert "device lost" not in str(output.error)
    assert "device lost" in caplog.text
    assert harness.engine.block_pool.num_held == 2  # a transfer may be reading them
    harness.engine.abort("exporting")
    harness.run()
    assert harness.texts["survivor"] == expected
    harness.assert_all_free()


def test_a_typed_error_of_the_runner_is_passed_on(fake: SimpleNamespace) -> None:
    harness = fake.make_harness()
    harness.engine.add(fake.make_seq("r", prompt(6)))
    harness.runner.fail_with = error = ModelError("bad weights")
    harness.step()
    assert harness.finished["r"].error is error


def test_a_queue_that_has_failed_keeps_no_blocks_from_reservations(fake: SimpleNamespace) -> None:
    harness = fake.make_harness(num_blocks=10)
    harness.engine.add(fake.make_seq("running", prompt(18), 10))
    harness.step()
    harness.engine.add(fake.make_seq("stuck", prompt(30, 200), 10))
    harness.step()
    assert harness.engine.reserve(fake.make_seq("remote", prompt(8, 500), 4)) is None
    harness.take(harness.engine.fail_all(RuntimeError("a bug")))
    assert harness.engine.reserve(fake.make_seq("remote", prompt(8, 500), 4)) is not None


def test_a_preempted_sequence_still_reports_what_was_cached_at_first(fake: SimpleNamespace) -> None:
    harness = fake.make_harness(num_blocks=8)
    harness.engine.add(fake.make_seq("old", prompt(6), 20))
    harness.engine.add(fake.make_seq("young", prompt(6, 200), 20))
    harness.run()
    assert harness.engine.load().num_preemptions > 0
    assert harness.finished["young"].num_cached_tokens == 0


def test_an_engine_that_waits_for_others_blocks_has_no_work_until_they_come(
    fake: SimpleNamespace,
) -> None:
    harness = fake.make_harness(num_blocks=10)
    assert harness.engine.reserve(fake.make_seq("remote", prompt(36), 4)) is not None
    local = fake.make_seq("local", prompt(10, 200), 4)
    expected = fake.undisturbed(local)
    harness.engine.add(local)
    assert harness.engine.has_work
    harness.step()
    assert not harness.engine.has_work
    harness.engine.abort("remote")
    harness.run()
    assert harness.texts["local"] == expected


def test_the_load_counts_sequences_tokens_and_blocks(fake: SimpleNamespace) -> None:
    harness = fake.make_harness(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=8)
    for i in range(2):
        harness.engine.add(fake.make_seq(f"r{i}", prompt(10, 100 * i)))
    harness.step()
    load = harness.engine.load()
    # Where steps overlap the second one has begun; what it computes is not there yet.
    assert (load.num_running, load.num_waiting) == ((2, 0) if fake.overlap else (1, 1))
    assert load.num_remote == 0
    assert load.num_waiting_tokens == load.num_own_prompt_tokens == 2 + 10
    assert (load.num_running_prompt_tokens, load.num_waiting_prompt_tokens) == (
        (2 + 10, 0) if fake.overlap else (2, 10)
    )
    num_free = 58 if fake.overlap else 61
    assert (load.num_blocks, load.num_free_blocks, load.num_cached_blocks) == (64, num_free, 0)


def test_listeners_hear_which_blocks_can_be_shared(fake: SimpleNamespace) -> None:
    harness = fake.make_harness(num_blocks=8)
    known: set[bytes] = set()
    harness.engine.block_pool.on_stored = known.update
    harness.engine.block_pool.on_removed = known.difference_update
    for i in range(6):
        harness.engine.add(fake.make_seq(f"r{i}", prompt(10, 50 * i)))
    harness.run()
    assert known == set(harness.engine.block_pool._blocks_of[0])
    assert len(known) > 4


@pytest.mark.parametrize(("kind", "num_tokens"), [("cpu", 2048), ("gpu", 8192)])
def test_the_longest_step_is_longer_on_a_gpu_unless_the_configuration_says_otherwise(
    fake: SimpleNamespace, kind: str, num_tokens: int
) -> None:
    runner = fake.FakeRunner(8, 4)
    runner.device_kind = kind
    engines = [Engine(EngineConfig(max_num_batched_tokens=each), runner) for each in (None, 99)]
    assert [each.scheduler.max_num_batched_tokens for each in engines] == [num_tokens, 99]
