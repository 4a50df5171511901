"""Any interleaving of arrivals, remote prefills, prefix pulls, late writes, stops, aborts and
failures, with launched steps at any stage: same text.
"""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tandem.engine.schedule.sequence import Sequence, SequenceStatus
from tandem.runtime.messages import StopConditions

GARBAGE = 666
stops = st.none() | st.integers(0, 8)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=24)


class EngineMachine(RuleBasedStateMachine):
    """A small pool, prompts that share prefixes, and everything that can happen to them."""

    fake: ClassVar[SimpleNamespace]
    seen: ClassVar[Counter[str]]  # what happened in all examples together

    def __init__(self) -> None:
        super().__init__()
        self.harness = self.fake.make_harness(
            num_blocks=16, max_num_seqs=5, max_num_batched_tokens=12, prefill_chunk_tokens=5
        )
        self.engine = self.harness.engine
        self.runner = self.harness.runner
        self.seqs: dict[str, Sequence] = {}
        self.expected: dict[str, list[int]] = {}
        self.fills: dict[str, list[int]] = {}  # of open reservations
        self.pulls: dict[str, list[tuple[int, int]]] = {}  # sequences that wait for their prefix
        self.streamed: set[str] = set()  # their first token has reached the client already
        self.quarantined: list[list[int]] = []
        self.dropped: set[str] = set()  # aborted

    def sequence(
        self,
        tokens: list[int],
        max_tokens: int,
        stop_at: int | None = None,
        *,
        prefill_only: bool = False,
    ) -> Sequence:
        """It stops by itself with what it would draw as its token number `stop_at`."""
        request_id = f"r{len(self.seqs)}"
        seq = self.fake.make_seq(request_id, tokens, max_tokens, prefill_only=prefill_only)
        if stop_at is not None and stop_at < max_tokens:
            stop_token = self.fake.undisturbed(seq)[stop_at]
            stop = StopConditions(max_tokens=max_tokens, stop_token_ids=[stop_token])
            seq = self.fake.make_seq(request_id, tokens, stop=stop)
        self.seqs[request_id] = seq
        self.expected[request_id] = self.fake.undisturbed(seq)
        return seq

    @rule(tokens=prompts, max_tokens=st.integers(1, 20), stop_at=stops)
    def add(self, tokens: list[int], max_tokens: int, stop_at: int | None) -> None:
        self.engine.add(self.sequence(tokens, max_tokens, stop_at))

    @rule(tokens=prompts)
    def export(self, tokens: list[int]) -> None:
        self.engine.add(self.sequence(tokens, 1, prefill_only=True))

    @rule(tokens=prompts, max_tokens=st.integers(1, 20), stop_at=stops)
    def reserve(self, tokens: list[int], max_tokens: int, stop_at: int | None) -> None:
        seq = self.sequence(tokens, max_tokens, stop_at)
        reservation = self.engine.reserve(seq)
        if reservation is None:
            self.engine.add(seq)
        else:
            self.fills[seq.request_id] = [block_id for _, block_id in reservation.fill]

    @rule(tokens=prompts, num_blocks=st.integers(0, 6))
    def begin_a_pull(self, tokens: list[int], num_blocks: int) -> None:
        seq = self.sequence(tokens, 1, prefill_only=True)
        fill = self.engine.reserve_prefix(seq, num_blocks)
        if fill:
            self.pulls[seq.request_id] = fill
        else:
            self.engine.add(seq)

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), proven=st.booleans())
    def end_a_pull(self, data: st.DataObject, proven: bool) -> None:
        seq = self.seqs[data.draw(st.sampled_from(sorted(self.pulls)))]
        fill = self.pulls.pop(seq.request_id)
        if proven:
            self.runner.land(seq.token_ids, fill)
        self.engine.adopt_prefix(seq.request_id, proven=proven)
        self.engine.add(seq)

    def an_open_handoff(self, data: st.DataObject) -> Sequence:
        return self.seqs[data.draw(st.sampled_from(sorted(self.fills)))]

    def first_token(self, seq: Sequence) -> SimpleNamespace:
        """What a remote worker draws: the text's first token, or the one that stops it there."""
        text = self.expected[seq.request_id] or seq.stop.stop_token_ids
        return self.fake.FakeToken(text[0])

    @precondition(lambda self: self.fills)
    @rule(data=st.data())
    def stream_the_first_token(self, data: st.DataObject) -> None:
        seq = self.an_open_handoff(data)
        if self.expected[seq.request_id]:
            self.streamed.add(seq.request_id)

    @precondition(lambda self: self.fills)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        seq = self.an_open_handoff(data)
        num_cached = seq.num_reserved_cached_blocks * self.runner.block_size
        self.runner.fill(seq, num_cached, seq.num_prompt_tokens)
        first = self.first_token(seq)
        self.harness.take([self.engine.admit(seq.request_id, first)])
        del self.fills[seq.request_id]

    @precondition(lambda self: self.fills)
    @rule(data=st.data(), quarantined=st.booleans())
    def give_up_the_handoff(self, data: st.DataObject, quarantined: bool) -> None:
        seq = self.an_open_handoff(data)
        first = None
        if seq.request_id in self.streamed:
            first = self.first_token(seq)
        output = self.engine.prefill_locally(seq.request_id, quarantined=quarantined, first=first)
        if output is not None:
            self.harness.take([output])
        block_ids = self.fills.pop(seq.request_id)
        if quarantined:
            self.quarantined.append(block_ids)

    @precondition(lambda self: self.fills or self.pulls or self.quarantined)
    @rule(data=st.data())
    def a_write_lands(self, data: st.DataObject) -> None:
        pulls = [[block_id for _, block_id in fill] for fill in self.pulls.values()]
        targets = [*self.fills.values(), *pulls, *self.quarantined]
        for block_id in data.draw(st.sampled_from(targets)):
            for offset in range(self.runner.block_size):
                self.runner.slots[block_id * self.runner.block_size + offset] = GARBAGE

    @precondition(lambda self: self.quarantined)
    @rule()
    def the_writes_have_settled(self) -> None:
        self.engine.release_quarantined(self.quarantined.pop())

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), quarantined=st.booleans(), in_step=st.booleans())
    def abort(self, data: st.DataObject, quarantined: bool, in_step: bool) -> None:
        if in_step:
            self.engine.launch()
        running = [request_id for request_id in self.engine.scheduler.running if in_step]
        request_id = data.draw(st.sampled_from(running or sorted(self.seqs)))
        is_remote = self.seqs[request_id].status is SequenceStatus.WAITING_FOR_REMOTE_KVS
        if self.engine.abort(request_id, quarantined=quarantined):
            self.dropped.add(request_id)
        block_ids = self.fills.pop(request_id, None)
        assert is_remote == (block_ids is not None)
        if request_id in self.pulls:
            block_ids = [block_id for _, block_id in self.pulls.pop(request_id)]
        if block_ids is not None and quarantined:
            self.quarantined.append(block_ids)

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.harness.step()

    @rule()
    def launch(self) -> None:
        self.engine.launch()

    @rule()
    def collect(self) -> None:
        self.harness.take(self.engine.collect())

    @rule()
    def the_device_catches_up(self) -> None:
        self.runner.catch_up()

    @rule()
    def a_launch_fails(self) -> None:
        self.runner.fail_with = RuntimeError("injected")
        self.step(1)
        self.runner.fail_with = None

    @rule(num_steps=st.integers(0, 2))
    def a_launched_step_fails(self, num_steps: int) -> None:
        self.runner.fail_later_with = RuntimeError("injected")
        self.engine.launch()
        self.runner.fail_later_with = None
        self.step(num_steps)

    @precondition(lambda self: len(self.seqs) % 8 == 7)
    @rule()
    def everything_fails(self) -> None:
        self.harness.take(self.engine.fail_all(RuntimeError("injected")))

    @rule()
    def release_what_was_exported(self) -> None:
        for request_id, seq in self.seqs.items():
            if seq.prefill_only and seq.status is SequenceStatus.FINISHED:
                self.engine.abort(request_id)

    @invariant()
    def every_block_is_accounted_for_and_every_token_is_right(self) -> None:
        self.engine.check_invariants()
        assert self.engine.block_pool.num_quarantined == sum(map(len, self.quarantined))
        for request_id, text in self.harness.texts.items():
            assert text == self.expected[request_id][: len(text)]
        self.seen["overlapped"] += self.runner.num_overlapped > 0
        self.seen["draining"] += bool(self.engine.scheduler.draining)

    def teardown(self) -> None:
        for request_id in list(self.pulls):
            self.engine.adopt_prefix(request_id, proven=False)
            self.engine.add(self.seqs[request_id])
        for request_id in list(self.fills):
            self.engine.prefill_locally(request_id, quarantined=False)
            self.fills.pop(request_id)
        while self.quarantined:
            self.the_writes_have_settled()
        self.release_what_was_exported()
        while self.engine.has_work:
            self.harness.run()
            self.release_what_was_exported()
        for request_id, text in self.expected.items():
            last = self.harness.finished.get(request_id)
            if request_id in self.dropped or (last is not None and last.error is not None):
                continue
            assert self.harness.texts[request_id] == text
        self.harness.assert_all_free()


def test_the_text_and_the_pool_are_right_whatever_happens(
    fake: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    seen: Counter[str] = Counter()
    machine: Callable[[], RuleBasedStateMachine] = type(
        "Machine", (EngineMachine,), {"fake": fake, "seen": seen}
    )
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=40))
    assert seen["draining"] > 0 and (seen["overlapped"] > 0) == fake.overlap
