"""What a real Slurm refuses, or cannot start: one line that says what to do."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.launch.slurm.slurm_cluster import SlurmCluster, processes_of
from tests.services import eventually
from tests.stream_load import StreamLoad

pytestmark = pytest.mark.slow
NUM_HOSTS, NODE = 1, {"num_cpus": 4}

COMMAND_S = 100.0


def tandem(slurm: SlurmCluster, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "tandem.launch", "slurm", *words],
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )


def refusal(slurm: SlurmCluster, folder: Path, *words: str) -> str:
    """Return the error of an `up` that cannot succeed, and end its jobs."""
    place = ("--state-dir", str(folder))
    done = tandem(slurm, "up", "bundled", "--gpus", "0", *place, *words)
    slurm.end_jobs()
    assert done.returncode == 1, done.stderr
    return next(line for line in done.stderr.splitlines() if line.startswith("error: "))


def test_the_scripts_pass_slurms_own_check(slurm: SlurmCluster, tmp_path: Path) -> None:
    options = ("--gpus", "0", "--cpus", "1", "--time", "1:00:00", "--sbatch=--mem=100")
    done = tandem(slurm, "render", "bundled", *options, "--state-dir", str(tmp_path))
    scripts = [text for text in done.stdout.split("# ---- ") if text]
    assert len(scripts) == 2
    for text in scripts:
        path = tmp_path / "script.sh"
        path.write_text(text.partition("\n")[2])
        checked = subprocess.run(
            ["sbatch", "--test-only", "--array=0-3", str(path)],
            env=slurm.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        assert checked.returncode == 0 and "to start at" in checked.stderr, checked.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("-p", "nowhere"), "`sinfo` lists the partitions: --partition"),
        (("--gpus", "1"), "the partition has no GPUs: --gpus 0"),
        (("--tp", "8"), "no node of the partition has so many GPUs or cores"),
        (("-p", "closed", "--timeout-s", "2"), "the partition is down: `sinfo -R`"),
    ],
)
def test_what_cannot_start_is_one_line_with_a_remedy(
    slurm: SlurmCluster, tmp_path: Path, words: tuple[str, ...], reason: str
) -> None:
    assert reason in refusal(slurm, tmp_path / "state", *words)


def test_a_setting_that_no_restart_mends_ends_the_wait(slurm: SlurmCluster, tmp_path: Path) -> None:
    # the bundled model has 2 KV heads, a node has 4 cores, the service job one of them
    words = ("--engine.tp=3", "--workers", "1")
    assert "worker 0 ended" in refusal(slurm, tmp_path / "state", *words)
    assert "tp 3: a model of" in (tmp_path / "state/logs/worker-0.log").read_text()


def test_the_processes_of_a_worker_are_one_job_and_begin_anew_together(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    place = ("--state-dir", str(state))
    words = ("--gpus", "0", "--tp", "2", "--workers", "1", "--frontend.port=0")
    up = tandem(slurm, "up", "bundled", *words, *place)
    try:
        assert up.returncode == 0, up.stderr
        assert "no other node can stand by" in up.stderr
        jobs = slurm.run("squeue", "-h", "-n", "tandem-worker", "-o", "%C %D")
        assert jobs.split() == ["2", "1"]  # cores, nodes
        asyncio.run(_loses_a_rank(up.stdout.strip(), state))
    finally:
        tandem(slurm, "down", *place)
        slurm.end_jobs()


async def _loses_a_rank(url: str, state: Path) -> None:
    async with StreamLoad(lambda: url, "tandem-tiny") as load:
        await load.first_answer_s()
        (worker,) = processes_of("tandem.launch worker", state)
        ranks = _ranks_of(worker)
        os.kill(ranks[0], signal.SIGKILL)
        await eventually(lambda: worker not in processes_of("tandem.launch worker", state))
        await load.first_answer_s()
    assert "ended with 72" in (state / "logs/worker-0.log").read_text()


def _ranks_of(worker: int) -> list[int]:
    """The processes that a worker has started to compute with it."""
    children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
    return [pid for pid, command in commands.items() if "rank_process" in command]


def test_a_drained_node_is_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    node = next(iter(slurm.slurmds))
    slurm.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    try:
        assert "drained" in refusal(slurm, tmp_path / "state", "--timeout-s", "3")
    finally:
        slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME")


def test_a_folder_that_is_not_shared_is_named(slurm: SlurmCluster) -> None:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))  # each host of the test has its own
    try:
        error = refusal(slurm, folder, "--timeout-s", "60")
    finally:
        shutil.rmtree(folder)
    assert f"{folder} is not shared with" in error
    assert "--state-dir" in error


def test_without_slurm_the_command_says_where_to_run_it(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tandem.launch", "slurm", "up", "--state-dir", str(tmp_path)],
        env=os.environ | {"PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert done.returncode == 1
    assert "run this on a login node of Slurm" in done.stderr
