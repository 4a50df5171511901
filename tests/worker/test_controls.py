"""An operator's commands to a worker that serves."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import InvalidRequestError, UnavailableError
from tandem.runtime.wire.cluster_messages import ControlName, ControlOutcome, WorkerControl
from tandem.runtime.wire.messages import encode
from tandem.worker import controls
from tests.handoff_peer import fresh_prompt
from tests.worker.pair import Both, Pair

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def send(pair: Pair, worker: Both, name: ControlName, duration_ms: int = 1000) -> str:
    control = encode(WorkerControl(name, duration_ms))
    async with RequestContext(timeout_s=60) as context:
        address = worker.node.server.address
        answer = await pair.peer.node.client.call(address, "control", control, context)
    return msgspec.msgpack.decode(answer, type=ControlOutcome).message


async def test_a_cleared_prefix_cache_is_empty_and_what_runs_goes_on(pair: Pair) -> None:
    prompt, running = fresh_prompt(21, seed=1), fresh_prompt(21, seed=2)
    await (await pair.ask(pair.one, prompt, place="local")).whole()
    pool = pair.one.worker.engine.block_pool
    num_cached = pool.num_cached
    assert num_cached > 0
    answer = await pair.ask(pair.one, running, num_tokens=40, place="local")
    assert await send(pair, pair.one, "clear-prefix-cache") == (
        f"{num_cached} cached blocks are free"
    )
    assert await answer.whole() == pair.undisturbed(running, 40)
    assert (await pair.answered(pair.one, prompt, place="local")).num_cached_tokens == 0


async def test_a_profile_has_the_steps_of_its_time(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controls.tempfile, "tempdir", str(tmp_path))
    taking = asyncio.create_task(send(pair, pair.one, "profile", 300))
    while not taking.done():
        await pair.answered(pair.one, fresh_prompt(9, seed=3), place="local")
    path = Path((await taking).removeprefix("300 ms of the engine are in "))
    assert "aten::" in read_private(path)
    assert list(path.parent.iterdir()) == [path]


async def test_a_profile_is_recorded_in_parts_between_which_the_streams_go_on(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controls.tempfile, "tempdir", str(tmp_path))
    durations: list[int] = []
    record = controls.Controls._record

    async def noted(self: controls.Controls, part: Path, duration_ms: int) -> None:
        durations.append(duration_ms)
        await record(self, part, duration_ms)

    monkeypatch.setattr(controls.Controls, "_record", noted)
    message = await send(pair, pair.one, "profile", 2 * controls.PART_MS + 7)
    assert durations == [controls.PART_MS, controls.PART_MS, 7]
    assert message.startswith("107 ms of the engine are in ")


def read_private(path: Path) -> set[str]:
    """The kinds of events of a trace that only its owner can read."""
    assert path.parent.stat().st_mode & 0o77 == 0
    events = json.loads(path.read_text())["traceEvents"]
    return {str(event.get("name", ""))[:6] for event in events}


async def test_one_profile_at_a_time(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controls.tempfile, "tempdir", str(tmp_path))
    taking = [send(pair, pair.one, "profile", 100) for _ in range(2)]
    outcomes = await asyncio.gather(*taking, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {str, UnavailableError}


@pytest.mark.parametrize("duration_ms", [0, controls.MAX_PROFILE_MS + 1])
async def test_a_duration_out_of_bounds_is_named(pair: Pair, duration_ms: int) -> None:
    with pytest.raises(InvalidRequestError, match="duration_ms"):
        await send(pair, pair.one, "profile", duration_ms)


async def test_an_unknown_command_is_named(pair: Pair) -> None:
    with pytest.raises(InvalidRequestError, match=r"malformed WorkerControl: .*name"):
        await send(pair, pair.one, "explode")  # type: ignore[arg-type]
