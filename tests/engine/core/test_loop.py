import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.engine.core.engine import Engine
from tandem.engine.core.loop import EngineLoop, build_in_thread
from tandem.engine.schedule.outputs import SequenceOutput
from tandem.engine.schedule.sequence import LayerProgress
from tandem.engine.step.outcome import DeviceLostError
from tandem.runtime.errors import InternalError, NotFoundError, UnavailableError


class Outputs:
    """Collects what the loop delivers and lets a test wait for it."""

    def __init__(self) -> None:
        self.batches: list[list[SequenceOutput]] = []
        self.threads: set[int] = set()
        self._changed = asyncio.Event()

    def __call__(self, outputs: list[SequenceOutput]) -> None:
        self.batches.append(outputs)
        self.threads.add(threading.get_ident())
        self._changed.set()

    def text(self, request_id: str) -> list[int]:
        return [
            token_id
            for outputs in self.batches
            for output in outputs
            if output.request_id == request_id
            for token_id in output.token_ids
        ]

    def finished(self) -> set[str]:
        return {o.request_id for outputs in self.batches for o in outputs if o.finish_reason}

    async def until(self, predicate: Callable[[], bool]) -> None:
        while not predicate():
            self._changed.clear()
            await self._changed.wait()


@asynccontextmanager
async def running(engine: Engine, **options: object) -> AsyncIterator[tuple[EngineLoop, Outputs]]:
    outputs = Outputs()
    loop = EngineLoop(engine, outputs, strict=True, **options)
    await loop.start()
    try:
        yield loop, outputs
    finally:
        await loop.stop()


async def test_outputs_of_one_step_come_together_on_the_asyncio_thread(
    fake: SimpleNamespace,
) -> None:
    seqs = [fake.make_seq(f"r{i}", [i, 2, 3], 6) for i in range(8)]
    expected = {seq.request_id: fake.undisturbed(seq) for seq in seqs}

    def add_all(engine: Engine) -> None:
        for seq in seqs:
            engine.add(seq)

    async with running(fake.make_harness().engine) as (loop, outputs):
        loop.post(add_all)
        await outputs.until(lambda: len(outputs.finished()) == 8)
        assert [len(batch) for batch in outputs.batches] == [8] * 6
        assert {name: outputs.text(name) for name in expected} == expected
        assert outputs.threads == {threading.get_ident()}
        assert loop.progress[0] >= 6


async def test_what_waits_for_the_launched_step_comes_after_its_outputs_and_before_the_next(
    fake: SimpleNamespace,
) -> None:
    num_expected, num_found = [], []
    async with running(fake.make_harness().engine) as (loop, outputs):

        def wait(engine: Engine) -> None:
            num_expected.append(loop.progress[0] + engine.num_in_flight)
            loop.after_launched(lambda: num_found.append(len(outputs.batches)))

        loop.post(wait)
        loop.post(lambda engine: engine.add(fake.make_seq("r", [1, 2, 3], 30)))
        await outputs.until(lambda: len(outputs.batches) >= 3)
        loop.post(wait)
        await outputs.until(lambda: "r" in outputs.finished())
        await loop.call(lambda engine: None)
    assert num_found == num_expected and num_expected[0] == 0 < num_expected[1]


@pytest.mark.parametrize("field", ["fail_with", "fail_later_with"])
async def test_a_lost_device_fails_every_sequence_at_once_as_unavailable_and_is_announced_after(
    fake: SimpleNamespace, field: str
) -> None:
    """The frontend tries another worker after this error, and computing again would only fail."""
    harness = fake.make_harness()
    losses: list[DeviceLostError] = []
    outputs = Outputs()
    ended_before_loss: set[str] = set()

    def on_device_lost(error: DeviceLostError) -> None:
        ended_before_loss.update(outputs.finished())
        losses.append(error)

    loop = EngineLoop(harness.engine, outputs, on_device_lost=on_device_lost, strict=True)
    await loop.start()
    setattr(harness.runner, field, DeviceLostError("cuda:0 is lost"))

    def add_all(engine: Engine) -> None:
        for i in range(4):
            engine.add(fake.make_seq(f"r{i}", [i, 2, 3], 6))

    loop.post(add_all)
    await outputs.until(lambda: len(outputs.finished()) == 4)
    await loop.stop()
    assert len(losses) == 1 and len(ended_before_loss) == 4
    for output in outputs.batches[0]:
        assert isinstance(output.error, UnavailableError) and not output.token_ids
    harness.assert_all_free()


async def test_an_engine_without_work_notices_that_its_device_is_lost(
    fake: SimpleNamespace,
) -> None:
    losses: list[DeviceLostError] = []
    is_noticed, num_checks = asyncio.Event(), 0

    def check_device() -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks == 3:
            raise DeviceLostError("cuda:0 is lost")

    def on_device_lost(error: DeviceLostError) -> None:
        losses.append(error)
        is_noticed.set()

    options: dict[str, Any] = {"on_device_lost": on_device_lost, "check_device": check_device}
    harness = fake.make_harness()
    async with running(harness.engine, **options, idle_check_after_s=0.001) as (loop, _):
        async with asyncio.timeout(20):
            await is_noticed.wait()
        assert not await loop.call(lambda engine: engine.has_work)
    assert [str(loss) for loss in losses] == ["cuda:0 is lost"]


async def test_news_of_layers_comes_on_the_asyncio_thread_before_its_steps_outputs(
    fake: SimpleNamespace,
) -> None:
    order: list[object] = []
    threads: set[int] = set()
    ended = asyncio.Event()

    def on_layers(progress: list[LayerProgress]) -> None:
        threads.add(threading.get_ident())
        order.append([(each.request_id, each.num_layers) for each in progress])

    def on_outputs(outputs: list[SequenceOutput]) -> None:
        order.append([output.request_id for output in outputs])
        ended.set()

    loop = EngineLoop(fake.make_harness().engine, on_outputs, strict=True)
    loop.listen_to_layers(on_layers)
    await loop.start()
    seq = fake.make_seq("r", [1, 2, 3], 1, prefill_only=True, num_layer_groups=3)
    loop.post(lambda engine: engine.add(seq))
    await ended.wait()
    await loop.stop()
    assert order == [[("r", 2)], [("r", 4)], ["r"]]
    assert threads == {threading.get_ident()}


async def test_a_step_does_not_wait_until_the_news_of_its_layers_is_heard(
    fake: SimpleNamespace,
) -> None:
    told = threading.Event()
    heard: list[LayerProgress] = []
    engine = fake.make_harness().engine
    async with running(engine) as (loop, outputs):
        loop.listen_to_layers(heard.extend)
        announce = engine.on_layers

        def announce_and_tell(progress: list[LayerProgress]) -> None:
            announce(progress)
            told.set()

        engine.on_layers = announce_and_tell
        seq = fake.make_seq("r", [1, 2, 3], 1, prefill_only=True, num_layer_groups=2)
        loop.post(lambda engine: engine.add(seq))
        assert told.wait(60)  # with the asyncio thread, which therefore has heard nothing yet
        assert heard == []
        await outputs.until(lambda: outputs.finished() == {"r"})
        assert [each.num_layers for each in heard] == [3]


async def test_a_call_returns_what_its_command_returns_or_raises(fake: SimpleNamespace) -> None:
    async with running(fake.make_harness().engine) as (loop, _):
        assert await loop.call(lambda engine: engine.load().num_blocks) == 64
        with pytest.raises(NotFoundError, match="nobody"):
            await loop.call(lambda engine: engine.admit("nobody", fake.FakeToken(1)))


async def test_commands_run_in_order_on_the_engine_thread(fake: SimpleNamespace) -> None:
    seen: list[int] = []
    threads: set[str] = set()

    def note(i: int) -> Callable[[Engine], None]:
        def command(engine: Engine) -> None:
            seen.append(i)
            threads.add(threading.current_thread().name)

        return command

    async with running(fake.make_harness().engine) as (loop, _):
        for i in range(50):
            loop.post(note(i))
        await loop.call(note(50))
    assert seen == list(range(51))
    assert threads == {"tandem-engine"}


async def test_a_failing_command_is_logged_and_the_engine_goes_on(
    fake: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(fake.make_harness().engine) as (loop, outputs):
        loop.post(lambda engine: engine.block_pool.release_quarantined([3]))
        loop.post(lambda engine: engine.add(fake.make_seq("r", [1, 2], 2)))
        await outputs.until(lambda: outputs.finished() == {"r"})
    assert "block 3 is not quarantined" in caplog.text


async def test_a_bug_in_a_step_ends_its_sequences_with_an_error(
    fake: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    harness = fake.make_harness()

    def fail() -> None:
        harness.engine.scheduler.__dict__.pop("schedule")
        raise ZeroDivisionError

    harness.engine.scheduler.schedule = fail
    async with running(harness.engine) as (loop, outputs):
        loop.post(lambda engine: engine.add(fake.make_seq("victim", [1, 2], 2)))
        await outputs.until(lambda: outputs.finished() == {"victim"})
        assert isinstance(outputs.batches[0][0].error, InternalError)
        loop.post(lambda engine: engine.add(fake.make_seq("next", [1, 2], 2)))
        await outputs.until(lambda: outputs.finished() == {"victim", "next"})
        assert len(outputs.text("next")) == 2
    assert "ZeroDivisionError" in caplog.text


async def test_commands_reach_a_busy_engine_between_its_steps(fake: SimpleNamespace) -> None:
    async with running(fake.make_harness(num_blocks=1000).engine) as (loop, outputs):
        loop.post(lambda engine: engine.add(fake.make_seq("long", [1, 2], 3000)))
        await outputs.until(lambda: len(outputs.batches) > 3)
        assert loop.progress[1]
        assert await loop.call(lambda engine: engine.abort("long"))
        num_tokens = len(outputs.text("long"))
        assert await loop.call(lambda engine: engine.has_work) is False
        assert len(outputs.text("long")) == num_tokens < 3000


async def test_an_idle_engine_is_not_busy_and_uses_no_processor(fake: SimpleNamespace) -> None:
    async with running(fake.make_harness().engine, idle_check_after_s=0.01) as (loop, _):
        before_s = await loop.call(lambda engine: time.thread_time())
        await asyncio.sleep(0.3)
        assert loop.progress == (0, False)
        assert await loop.call(lambda engine: time.thread_time()) - before_s < 0.1


async def test_wrong_bookkeeping_is_noticed_when_idle(
    fake: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    engine = fake.make_harness().engine
    noticed = threading.Event()
    check = engine.check_invariants

    def check_and_tell() -> None:
        try:
            check()
        except AssertionError:
            noticed.set()
            raise

    engine.check_invariants = check_and_tell
    loop = EngineLoop(engine, Outputs(), strict=True, idle_check_after_s=0.001)
    await loop.start()
    loop.post(lambda engine: engine.block_pool.allocate(1))
    await asyncio.to_thread(noticed.wait, 20)
    with pytest.raises(AssertionError, match="disagree"):
        await loop.stop()
    assert "invariants are violated" in caplog.text


async def test_after_stop_calls_are_refused(fake: SimpleNamespace) -> None:
    loop = EngineLoop(fake.make_harness().engine, Outputs())
    await loop.start()
    await loop.stop()
    await loop.stop()
    with pytest.raises(UnavailableError, match="stopped"):
        await loop.call(lambda engine: None)


async def test_a_caller_that_went_away_harms_nobody(fake: SimpleNamespace) -> None:
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with running(fake.make_harness().engine) as (loop, _):
        release = threading.Event()
        loop.post(lambda engine: release.wait(60))
        waiter = asyncio.create_task(loop.call(lambda engine: 1))
        await asyncio.sleep(0)
        waiter.cancel()
        release.set()
        assert await loop.call(lambda engine: 2) == 2
        with pytest.raises(asyncio.CancelledError):
            await waiter
    assert complaints == []


class Waits:
    """In place of the loop's `_taken`: what was under way whenever the engine thread waited."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.under_way: list[tuple[int, bool]] = []  # (steps, whether there was work)

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def wait(self, timeout: float) -> None:
        self.under_way.append((self.engine.num_in_flight, self.engine.has_work))


async def test_the_device_computes_while_asyncio_takes_a_steps_tokens(
    fake: SimpleNamespace,
) -> None:
    engine = fake.make_harness(num_blocks=1000).engine
    outputs = Outputs()
    loop = EngineLoop(engine, outputs, strict=True)
    loop._taken = waits = Waits(engine)
    await loop.start()
    loop.post(lambda engine: engine.add(fake.make_seq("r", [1, 2], 50)))
    await outputs.until(lambda: outputs.finished() == {"r"})
    await loop.stop()
    if fake.overlap:
        assert all(num_steps > 0 for num_steps, has_work in waits.under_way if has_work)
    assert len(waits.under_way) >= 50


async def test_a_launched_step_is_over_before_the_thread_ends(fake: SimpleNamespace) -> None:
    harness = fake.make_harness(num_blocks=1000)
    outputs = Outputs()
    loop = EngineLoop(harness.engine, outputs, strict=True)
    await loop.start()
    loop.post(lambda engine: engine.add(fake.make_seq("long", [1, 2], 3000)))
    await outputs.until(lambda: len(outputs.batches) > 3)
    await loop.stop()
    assert harness.engine.num_in_flight == 0 and harness.runner.uncollected == []
    harness.engine.check_invariants()


async def test_commands_of_every_kind_are_right_while_a_step_runs(fake: SimpleNamespace) -> None:
    engine = fake.make_harness(num_blocks=400).engine
    remote = fake.make_seq("remote", [9] * 10, 40)
    expected = fake.undisturbed(remote)
    fallen = fake.make_seq("fallen", [8] * 10, 40)
    expected_locally = fake.undisturbed(fallen)
    async with running(engine) as (loop, outputs):
        loop.post(lambda engine: engine.add(fake.make_seq("long", [1, 2], 1000)))
        await outputs.until(lambda: len(outputs.batches) > 3)
        reservation = await loop.call(lambda engine: engine.reserve(remote))
        assert reservation is not None
        assert await loop.call(lambda engine: engine.reserve(fallen)) is not None
        blocks = list(fallen.block_table)
        await loop.call(lambda engine: engine.prefill_locally("fallen", quarantined=True))
        await loop.call(lambda engine: engine.runner.fill(remote, 0, 10))
        first = await loop.call(lambda engine: engine.admit("remote", fake.FakeToken(expected[0])))
        await outputs.until(lambda: {"remote", "fallen"} <= outputs.finished())
        await loop.call(lambda engine: engine.release_quarantined(blocks))
        assert await loop.call(lambda engine: engine.load().num_quarantined_blocks) == 0
        assert await loop.call(lambda engine: engine.abort("long"))
    assert first.token_ids + outputs.text("remote") == expected
    assert outputs.text("fallen") == expected_locally


def test_building_in_a_thread_leaves_no_thread_behind_and_raises_what_building_raised() -> None:
    built_by = build_in_thread(threading.get_ident)
    assert built_by != threading.get_ident()
    assert built_by not in {thread.ident for thread in threading.enumerate()}

    def fail() -> None:
        raise NotFoundError("no such weights")

    with pytest.raises(NotFoundError, match="no such weights"):
        build_in_thread(fail)
