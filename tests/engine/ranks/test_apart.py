"""Ranks with a pool each, as on GPUs, give the answers of one process.

Their devices are CPUs here, which gather by gloo.
"""

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.shard import Shard
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.ranks.apart import ApartRank
from tandem.models.random_model import write_random_model
from tests.engine.ranks.running import bits_of, config_of, lose_rank
from tests.engine.step_doubles import CallAgain

ROOT = Path(__file__).parents[3]

SHAPE: dict[str, Any] = {
    "vocab_size": 333,
    "hidden_size": 56,
    "num_layers": 3,
    "head_dim": 16,
    "num_heads": 14,
    "num_kv_heads": 2,
    "intermediate_size": 76,
}


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("tandem.engine.execution.followers.are_apart", lambda config: True)


def answers_and_pool(
    model: Path, tp: int, recorder: CallAgain | None = None, **settings: object
) -> tuple[str, torch.Tensor]:
    runner = ModelRunner(config_of(model, tp, **settings), recorder)
    try:
        answers, _ = bits_of(runner, runner.model_config.vocab_size)
        return answers, runner.kv_cache.tensor.clone()
    finally:
        runner.close()


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_ranks_answer_as_one_and_each_keeps_the_kv_of_its_heads(
    tmp_path: Path, overlap: bool
) -> None:
    model = write_random_model(tmp_path, **SHAPE)
    one, whole = answers_and_pool(model, 1, overlap=overlap)
    two, part = answers_and_pool(model, 2, overlap=overlap)
    assert one == two
    assert part.shape[3] == 1 and torch.equal(part, whole[: len(part), :, :, :1])


@pytest.mark.slow
def test_all_ranks_replay_the_decode_steps_that_rank_0_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower, recorder = "tests.engine.ranks.recording_follower", CallAgain()
    monkeypatch.setattr("tandem.engine.execution.followers.MODULE", follower)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    model = write_random_model(tmp_path, **SHAPE)
    one, whole = answers_and_pool(model, 1, max_num_seqs=8, overlap=True)
    two, part = answers_and_pool(model, 2, recorder, max_num_seqs=8, overlap=True)
    assert one == two and recorder.num_replays > 10
    assert torch.equal(part, whole[: len(part), :, :, :1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "is_busy"),
    [(signal.SIGKILL, True), (signal.SIGSTOP, True), (signal.SIGKILL, False)],
)
def test_a_rank_that_ends_or_stops_is_named_and_ends_the_others(
    tmp_path: Path, number: signal.Signals, is_busy: bool
) -> None:
    runner = ModelRunner(config_of(write_random_model(tmp_path), 2))
    try:
        assert runner.followers is not None
        [pid] = runner.followers.pids
        lose_rank(runner, number, is_busy=is_busy)
    finally:
        runner.close()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(("others", "is_said"), [(100, False), (109, False), (120, True)])
def test_ranks_have_the_blocks_of_the_fullest_device_and_say_what_others_could_hold(
    others: int, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Beside:
        def least(self, number: int) -> int:
            return min(number, others if number > 0 else -others)

    rank = ApartRank(Shard(ModelConfig.__new__(ModelConfig), 2, 0), torch.device("cpu"), "", int)
    rank._exchange = Beside()  # type: ignore[assignment]
    assert rank.agree(100) == 100
    assert ("for 100 to 120 KV blocks, and each gets 100" in caplog.text) == is_said
