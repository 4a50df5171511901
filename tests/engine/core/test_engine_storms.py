"""Long random days of an engine whose pool is much too small, with launched steps at any stage.

There are remote prefills, prefix pulls, late writes, stops, aborts and failures.
"""

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tandem.engine.schedule.block_tables import held_blocks
from tandem.engine.schedule.sequence import Sequence, SequenceStatus
from tandem.engine.schedule.windows import NO_BLOCK, num_blocks_needed
from tandem.runtime.wire.messages import StopConditions

NUM_EVENTS = 150


class ForcedRuns:
    """A matcher of a known answer that forces runs of it: up to 9 tokens after a drawn one."""

    def __init__(self, seq: Sequence, answer: list[int]) -> None:
        self.seq = seq
        self.answer = answer
        self.num_forced = 0

    @property
    def forced(self) -> list[int]:
        drawn = self.seq.num_generated_tokens - 1
        forced = self.answer[drawn : drawn + 1 + drawn * 7 % 10]
        self.num_forced += len(forced[1:])
        return forced


class Storm:
    """One engine, one seed: an event at a time, and what each sequence must say in the end."""

    def __init__(self, fake: SimpleNamespace, seed: int, windows: tuple[int, ...] = (0,)) -> None:
        self.fake = fake
        self.rng = random.Random(seed)
        self.harness = fake.make_harness(
            num_blocks=num_blocks_needed(windows, 36, 4) + self.rng.choice((0, 3, 7)),
            windows=windows,
            max_num_seqs=self.rng.choice((2, 4, 6)),
            max_num_batched_tokens=self.rng.choice((6, 12, 40)),
            prefill_chunk_tokens=self.rng.choice((3, 7)),
            max_model_len=36,
        )
        self.engine, self.runner = self.harness.engine, self.harness.runner
        self.seqs: dict[str, Sequence] = {}
        self.expected: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.poisoned: set[str] = set()
        self.has_lost_steps = seed % 2 == 0  # for no fault of any sequence
        self.quarantined: list[list[int]] = []
        self.pulls: dict[str, list[tuple[int, int]]] = {}  # sequences that wait for their prefix
        self.matchers: list[ForcedRuns] = []
        self.num_waits = 0  # times that a launched step had to be collected first
        self.num_pulled = self.num_draining = self.num_reserved_later = 0

        schedule = self.engine.scheduler.schedule

        def watched() -> object:
            chunks = schedule()
            self.num_waits += chunks is None
            return chunks

        self.engine.scheduler.schedule = watched

    def sequence(self, *, prefill_only: bool = False) -> Sequence:
        rng, name = self.rng, f"r{len(self.seqs)}"
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 16))]
        max_tokens = 1 if prefill_only else rng.randint(1, 20)
        seq = self.fake.make_seq(name, tokens, max_tokens, prefill_only=prefill_only)
        text = self.fake.undisturbed(seq)
        if not prefill_only and rng.random() < 0.5:
            stop = StopConditions(max_tokens=max_tokens, stop_token_ids=[rng.choice(text)])
            seq = self.fake.make_seq(name, tokens, stop=stop)
        self.seqs[name] = seq
        self.expected[name] = text = self.fake.undisturbed(seq)
        if rng.random() < 0.2:
            end = seq.stop.stop_token_ids if len(text) < max_tokens else []
            self.matchers.append(ForcedRuns(seq, text + end))
            seq.matcher = self.matchers[-1]
        return seq

    def add(self) -> None:
        self.engine.add(self.sequence(prefill_only=self.rng.random() < 0.2))

    def reserve(self) -> None:
        seq = self.sequence()
        if self.engine.reserve(seq) is None:
            self.engine.add(seq)

    def add_for_a_row(self) -> None:
        """Queue a sequence that is reserved for once it has a batch row, or stays."""
        seq = self.sequence()

        def on_room() -> bool:
            scheduler = self.engine.scheduler
            assert seq.request_id in scheduler.waiting
            assert len(scheduler.running) + len(scheduler.remote) < scheduler.max_num_seqs
            if self.rng.random() < 0.3:
                return True
            is_reserved = self.engine.reserve(seq) is not None
            self.num_reserved_later += is_reserved
            return is_reserved or not scheduler.returns_blocks

        seq.on_room = on_room
        self.engine.add(seq)

    def begin_a_pull(self) -> None:
        seq = self.sequence(prefill_only=True)
        fill = self.engine.reserve_prefix(seq, self.rng.randrange(7))
        if fill:
            self.pulls[seq.request_id] = fill
        else:
            self.engine.add(seq)

    def end_a_pull(self) -> None:
        if self.pulls:
            name, fill = self.pulls.popitem()
            proven = self.rng.random() < 0.5
            self.num_pulled += proven
            if proven:
                self.runner.land(self.seqs[name].token_ids, fill)
            self.engine.adopt_prefix(name, proven=proven)
            self.engine.add(self.seqs[name])

    def a_remote_one(self) -> Sequence | None:
        remote = list(self.engine.scheduler.remote.values())
        return self.rng.choice(remote) if remote else None

    def fill_of(self, seq: Sequence) -> list[int]:
        return held_blocks(seq.block_table[seq.num_reserved_cached_blocks :])

    def first_token(self, seq: Sequence) -> SimpleNamespace:
        text = self.expected[seq.request_id] or seq.stop.stop_token_ids
        return self.fake.FakeToken(text[0])

    def admit(self) -> None:
        if (seq := self.a_remote_one()) is not None:
            num_cached = seq.num_reserved_cached_blocks
            fill = [each for each in enumerate(seq.block_table) if each[0] >= num_cached]
            self.runner.land(seq.token_ids, [each for each in fill if each[1] != NO_BLOCK])
            self.harness.take([self.engine.admit(seq.request_id, self.first_token(seq))])

    def give_up(self) -> None:
        if (seq := self.a_remote_one()) is not None:
            quarantined = self.rng.random() < 0.5
            if quarantined:
                self.quarantined.append(self.fill_of(seq))
            is_streamed = self.expected[seq.request_id] and self.rng.random() < 0.5
            first = self.first_token(seq) if is_streamed else None
            output = self.engine.prefill_locally(
                seq.request_id, quarantined=quarantined, first=first
            )
            if output is not None:
                self.harness.take([output])

    def writes_land(self) -> None:
        fills = [self.fill_of(seq) for seq in self.engine.scheduler.remote.values()]
        fills += [[block_id for _, block_id in fill] for fill in self.pulls.values()]
        for block_id in (i for fill in [*fills, *self.quarantined] for i in fill):
            start = block_id * self.runner.block_size
            self.runner.slots[start : start + self.runner.block_size] = [0] * self.runner.block_size

    def writes_have_settled(self) -> None:
        if self.quarantined:
            self.engine.release_quarantined(self.quarantined.pop())

    def abort(self) -> None:
        if self.seqs:
            name = self.rng.choice(list(self.seqs))
            is_remote = self.seqs[name].status is SequenceStatus.WAITING_FOR_REMOTE_KVS
            block_ids = self.fill_of(self.seqs[name]) if is_remote else []
            block_ids += [block_id for _, block_id in self.pulls.pop(name, [])]
            quarantined = self.rng.random() < 0.7
            if block_ids and quarantined:
                self.quarantined.append(block_ids)
            self.aborted.add(name)
            self.engine.abort(name, quarantined=quarantined)

    def abort_in_a_step(self) -> None:
        self.engine.launch()
        if running := list(self.engine.scheduler.running):
            self.aborted.add(running[0])
            self.engine.abort(running[0], quarantined=False)

    def release(self) -> None:
        for name, seq in self.seqs.items():
            if seq.prefill_only and seq.status is SequenceStatus.FINISHED:
                self.engine.abort(name)

    def fail_a_launch(self) -> None:
        self.runner.fail_with = RuntimeError("injected")
        self.engine.launch()
        self.runner.fail_with = None

    def fail_a_step(self) -> None:
        self.runner.fail_later_with = RuntimeError("injected")
        self.engine.launch()
        self.runner.fail_later_with = None

    def fail_all(self) -> None:
        self.harness.take(self.engine.fail_all(RuntimeError("injected")))

    def poison(self) -> None:
        if self.engine.scheduler.running:
            name = self.rng.choice(list(self.engine.scheduler.running))
            runner = self.runner
            self.rng.choice((runner.poison, runner.late_poison, runner.not_finite)).add(name)
            self.poisoned.add(name)

    def collect(self) -> None:
        self.harness.take(self.engine.collect())

    def events(self) -> dict[Callable[[], None], float]:
        """What may happen, and how often."""
        return {
            self.harness.step: 40, self.engine.launch: 8, self.collect: 8, self.runner.catch_up: 8,
            self.add: 11, self.add_for_a_row: 3, self.reserve: 4, self.begin_a_pull: 4,
            self.end_a_pull: 4, self.admit: 4, self.give_up: 1, self.writes_land: 3,
            self.writes_have_settled: 2, self.abort: 2, self.abort_in_a_step: 1, self.release: 6,
            self.poison: 1,
            self.fail_a_launch: int(self.has_lost_steps),
            self.fail_a_step: int(self.has_lost_steps), self.fail_all: int(self.has_lost_steps) / 4,
        }  # fmt: skip

    def run(self) -> None:
        events = self.events()
        for event in self.rng.choices(list(events), list(events.values()), k=NUM_EVENTS):
            event()
            self.engine.check_invariants()
            self.num_draining += bool(self.engine.scheduler.draining)
            assert self.engine.block_pool.num_quarantined == sum(map(len, self.quarantined))
        while self.pulls:
            self.end_a_pull()
        while self.quarantined:
            self.writes_have_settled()
        self.release()
        while self.engine.has_work or self.a_remote_one() is not None:
            self.admit()
            self.harness.run()
            self.release()

    def check_texts(self) -> None:
        for name, text in self.expected.items():
            said, last = self.harness.texts.get(name, []), self.harness.finished.get(name)
            assert said == text[: len(said)]
            if last is None:
                assert name in self.aborted
            elif last.error is None:
                assert said == text
            else:
                assert self.has_lost_steps or name in self.poisoned
        self.harness.assert_all_free()


@pytest.mark.parametrize("num_storms", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_every_text_is_right_after_any_storm(
    fake: SimpleNamespace, num_storms: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    num_preemptions = num_waits = num_overlapped = num_forced = num_pulled = num_draining = 0
    num_reserved_later = 0
    for seed in range(num_storms):
        storm = Storm(fake, seed)
        storm.run()
        storm.check_texts()
        num_preemptions += storm.engine.scheduler.num_preemptions
        num_waits += storm.num_waits
        num_pulled += storm.num_pulled
        num_draining += storm.num_draining
        num_reserved_later += storm.num_reserved_later
        num_overlapped += storm.runner.num_overlapped
        num_forced += sum(matcher.num_forced for matcher in storm.matchers)
    assert num_preemptions > 30 and num_forced > 75 and num_pulled > 10 and num_draining > 30
    assert num_reserved_later > 30
    assert (num_waits > 30) == (num_overlapped > 300) == fake.overlap


@pytest.mark.parametrize("windows", [(0, 6), (0, 0, 1, 9), (7,), (5, 13)])
def test_every_text_is_right_where_layers_have_windows(
    fake: SimpleNamespace, windows: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    num_preemptions = 0
    for seed in range(6):
        storm = Storm(fake, seed, windows)
        storm.run()
        storm.check_texts()
        num_preemptions += storm.engine.scheduler.num_preemptions
    assert num_preemptions > 2
