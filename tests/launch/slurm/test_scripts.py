"""The scripts of a deployment, run by bash with commands of Slurm that only take notes."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.config.model import EffectiveConfig, load_config
from tandem.config.planner import Mode
from tandem.config.sources import Setting
from tandem.engine.config import EngineConfig
from tandem.launch.cli.slurm_commands import Jobs, Place
from tandem.launch.run.options import ModelOptions
from tandem.launch.slurm.deployment import cores_for
from tandem.launch.slurm.scripts import SERVICE, WORKER, render
from tandem.runtime.errors import ConfigError
from tests.launch.slurm.unsubmitted import deployment_in
from tests.processes import line_until


def test_a_script_is_short_and_has_the_options(tmp_path: Path) -> None:
    scripts = render(deployment_in(tmp_path / "state"))
    for text in scripts.values():
        assert len(text.splitlines()) <= 60
        subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=20)
    directives = [
        shlex.split(line)[1] for line in scripts[WORKER].splitlines() if line.startswith("#SBATCH ")
    ]
    assert {
        *("--partition=gpu", "--time=24:00:00", "--gres=gpu:2", "--cpus-per-task=4"),
        *("--account=x y", "--signal=B:USR1@90", "--requeue", "--exclusive=user"),
    } <= set(directives)
    assert "exclusive" not in scripts[SERVICE]  # its node may have other users, too
    assert "--gpu cpu" not in scripts[WORKER]
    assert "'/models/with space'" in scripts[WORKER]


def test_a_planner_has_a_bound(tmp_path: Path) -> None:
    def planned(config: EffectiveConfig, planner: Mode | None) -> bool:
        place, model = Place("tandem", tmp_path), ModelOptions("bundled")
        return Jobs(planner=planner).deployment(place, model, config).has_planner

    with pytest.raises(ConfigError, match=r"--planner needs a bound, as in --planner.max_workers"):
        planned(load_config(), "act")
    bound = load_config().with_settings([Setting("planner.max_workers", 8, "a test")])
    assert planned(bound, "advise") and not planned(bound, None)


class Run:
    """A script that runs, with programs named sbatch and scontrol that note their words.

    That named squeue answers `queue`: a line for each service job.
    """

    def __init__(
        self,
        folder: Path,
        program: str,
        script: str,
        restarts: int = 0,
        requeues: int = 3,
        *,
        has_services: bool = True,
        queue: str = "",
    ) -> None:
        self.state = folder / "the state"
        tools = folder / "tools"
        tools.mkdir()
        self._notes = folder / "notes"
        for name in ("sbatch", "scontrol"):
            (tools / name).write_text(f'#!/bin/bash\necho {name} "$@" >> {self._notes}\n')
        (tools / "squeue").write_text(f"#!/bin/bash\nprintf '{queue}'\n")
        for tool in tools.iterdir():
            tool.chmod(0o755)
        deployment = deployment_in(self.state, sys.executable, "-c", program, requeues=requeues)
        if not has_services:
            (self.state / "services.json").unlink()
            (self.state / "secrets").write_text("echo reads secrets\n")
        self.process = subprocess.Popen(
            ["bash", "-c", render(deployment)[script]],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ
            | {
                "PATH": f"{tools}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "12",
                "SLURM_JOB_NAME": "a-b",
            }
            | {"SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": str(restarts)},
        )

    def notes(self) -> list[str]:
        return self._notes.read_text().splitlines() if self._notes.exists() else []

    def noted(self) -> list[str]:
        """Wait until the script has noted its process, maybe after the first words of that one."""
        path, deadline = self.state / "workers" / "12", time.monotonic() + 60
        while not (words := path.read_text().split() if path.exists() else []):
            assert time.monotonic() < deadline, "the script has not noted where its process runs"
            time.sleep(0.01)
        return words

    def end(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out


@pytest.mark.parametrize(("restarts", "notes"), [(2, ["scontrol requeue 12"]), (3, [])])
def test_a_process_that_dies_starts_again_and_then_its_job_does(
    tmp_path: Path, restarts: int, notes: list[str]
) -> None:
    program = "import os; print(os.environ['TANDEM_RUNTIME__CLUSTER_TOKEN']); raise SystemExit(4)"
    run = Run(tmp_path, program, WORKER, restarts)
    code, out = run.end()
    assert code == 4
    assert out.count("a b\n") == 3
    assert run.notes() == notes
    assert not list((run.state / "workers").iterdir())


def test_a_setting_that_is_wrong_is_not_tried_again(tmp_path: Path) -> None:
    run = Run(tmp_path, "print('tries'); raise SystemExit(2)", WORKER)
    code, out = run.end()
    assert (code, out.count("tries"), run.notes()) == (2, 1, [])


def test_the_processes_of_a_worker_have_a_core_for_each_thread() -> None:
    assert cores_for(EngineConfig(), 1, 0) == 0  # Slurm's default
    assert cores_for(EngineConfig(tp=2), 0, 0) == 2
    assert cores_for(EngineConfig(tp=2, threads=3), 0, 8) == 8
    assert cores_for(EngineConfig(tp=2), 2, 0) == 2
    with pytest.raises(ConfigError, match="--gpus 1: a worker of --tp 2 needs as many GPUs"):
        cores_for(EngineConfig(tp=2), 1, 0)
    with pytest.raises(ConfigError, match="2 processes have 6 threads"):
        cores_for(EngineConfig(tp=2, threads=3), 0, 5)


DRAINS = """
import signal, sys, time
def leave(number, frame):
    print("leaves at", signal.Signals(number).name, flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, leave)
print("serves", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("script", "number", "notes"),
    [
        (WORKER, signal.SIGUSR2, ""),
        (WORKER, signal.SIGUSR1, "sbatch --array=3 {state}/worker.sh"),
        (
            SERVICE,
            signal.SIGUSR1,
            "sbatch --dependency=singleton --job-name=a-b {state}/service.sh",
        ),
    ],
)
def test_a_signal_lets_the_process_leave_and_only_the_limit_brings_a_successor(
    tmp_path: Path, script: str, number: signal.Signals, notes: str
) -> None:
    run = Run(tmp_path, DRAINS, script, queue="12 one\\n")
    lines: list[str] = []
    line_until("serves", run.process, lines)
    assert run.noted()[0] == os.uname().nodename
    run.process.send_signal(number)
    code, out = run.end()
    assert code == 0, out
    assert out.count("leaves at SIGTERM") == 1
    assert run.notes() == ([notes.format(state=run.state)] if notes else [])


def test_the_successor_of_a_service_job_keeps_off_the_nodes_of_the_others(tmp_path: Path) -> None:
    run = Run(tmp_path, DRAINS, SERVICE, queue="12 one\\n120 two\\n7 three\\n")
    line_until("serves", run.process, [])
    run.noted()
    run.process.send_signal(signal.SIGUSR1)
    assert run.end()[0] == 0
    words = "sbatch --dependency=singleton --job-name=a-b --exclude=two,three"
    assert run.notes() == [f"{words} {run.state}/service.sh"]


def test_a_term_of_slurm_reaches_the_process_once(tmp_path: Path) -> None:
    run = Run(tmp_path, DRAINS, WORKER)
    line_until("serves", run.process, [])
    run.noted()
    os.killpg(run.process.pid, signal.SIGTERM)  # as Slurm does, to all processes of a job
    code, out = run.end()
    assert (code, run.notes()) == (0, [])
    assert out.count("leaves at SIGTERM") == 1


def test_a_signal_before_the_services_are_there_ends_the_job(tmp_path: Path) -> None:
    run = Run(tmp_path, "print('started')", WORKER, has_services=False)
    # the first thing that a script does after its traps
    line_until("reads secrets", run.process, [])
    run.process.send_signal(signal.SIGTERM)
    code, out = run.end()
    assert (code, out) == (0, "")
    assert run.notes() == []
