"""The ranks of a model end together, whatever happens to one of them."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest

from tandem.engine.execution.followers import Followers
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.step.outcome import DeviceLostError
from tandem.models.random_model import write_random_model
from tandem.runtime.errors import CapacityError
from tests.engine.ranks.running import bits_of, config_of, lose_rank


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "model")


@pytest.fixture
def runner(model: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner(config_of(model, 2))
    yield runner
    runner.close()


def followers_of(runner: ModelRunner) -> Followers:
    assert runner.followers is not None
    return runner.followers


@pytest.mark.slow
def test_the_other_ranks_end_with_close_and_no_signal_of_a_shell_ends_them(
    runner: ModelRunner,
) -> None:
    [pid] = followers_of(runner).pids
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    before = bits_of(runner, 512)
    os.kill(pid, signal.SIGSTOP)  # as a shell does to all of a job, and continues them
    os.kill(pid, signal.SIGCONT)
    assert bits_of(runner, 512)[0] == before[0]
    runner.close()
    runner.close()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("number", "is_busy"),
    [
        (signal.SIGSTOP, True),
        pytest.param(signal.SIGKILL, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, False, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_ends_or_stops_is_named_and_ends_the_others(
    runner: ModelRunner, number: signal.Signals, is_busy: bool
) -> None:
    followers, [pid] = followers_of(runner), followers_of(runner).pids
    error = lose_rank(runner, number, is_busy=is_busy)
    assert "step" in error.message
    runner.close()
    assert not psutil.pid_exists(pid)
    later = SimpleQueue[DeviceLostError]()
    followers.listen(later.put)  # it is told at once
    assert later.get(timeout=1).message == error.message


@pytest.mark.slow
def test_a_rank_whose_end_is_met_before_it_is_seen_is_named(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    [pid] = followers_of(runner).pids

    def end_and_send(channel: socket.socket, data: bytes) -> None:
        os.kill(pid, signal.SIGKILL)
        raise BrokenPipeError

    monkeypatch.setattr("tandem.engine.execution.followers.send", end_and_send)
    with pytest.raises(DeviceLostError, match=rf"rank 1 of 2 \(pid {pid}\) was killed by SIGKILL"):
        bits_of(runner, 512)


@pytest.mark.slow
def test_a_rank_that_cannot_start_gives_its_reason(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.engine.execution.followers.MODULE", "tandem.engine.ranks.absent")
    with pytest.raises(DeviceLostError, match=r"rank 1 of 2.* ended with status 1"):
        ModelRunner(config_of(model, 2))


@pytest.mark.slow
def test_an_error_of_one_rank_before_the_first_step_is_that_of_the_start(model: Path) -> None:
    before = set(psutil.Process().children())  # services of other tests
    with pytest.raises(CapacityError, match="one sequence of 4096 tokens"):
        ModelRunner(config_of(model, 2, num_blocks=4, max_model_len=4096))
    assert set(psutil.Process().children()) <= before
