"""Slurm's own commands, each with a time limit; what they refuse is one line and a remedy."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.runtime.errors import ServiceError
from tandem.runtime.printable import one_line

TIMEOUT_S = 30.0
MAX_REASON_BYTES = 300
LIVE_STATES = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED")
REMEDIES = {
    "invalid partition": "`sinfo` lists the partitions: --partition",
    "invalid account": "`sacctmgr show assoc user=$USER` lists yours: --sbatch=--account=NAME",
    "requested node configuration is not available": "no node has so many GPUs or cores; see "
    "`sinfo -N -l`",
    "PartitionConfig": "no node of the partition has so many GPUs or cores; see `sinfo -N -l`",
    "requested time limit": "the partition allows less: --time",
    "unable to contact": "slurmctld does not answer: `scontrol ping`",
    "invalid generic resource": "the partition has no GPUs: --gpus 0 for workers on CPUs",
    "PartitionDown": "the partition is down: `sinfo -R`",
    "ReqNodeNotAvail": "nodes are drained or reserved: `sinfo -R`",
    "DOWN, DRAINED": "nodes are down or drained: `sinfo -R`",
    "Resources": "the partition is full: `squeue` shows by whom",
    "Priority": "other jobs of the partition come first: `sprio`",
    "BeginTime": "Slurm waits about two minutes before it starts a requeued job",
    "JobHeldUser": "the job is held: `scontrol release JOB`",
    "launch failed requeued held": "the job is held after a failed start: `scontrol release JOB`",
    "QOS": "a limit of your QOS is reached: `sacctmgr show qos`",
    "Assoc": "a limit of your account is reached: `sacctmgr show assoc user=$USER`",
}


@dataclass(frozen=True, slots=True)
class Job:
    """A job, or an element of an array, as squeue shows it."""

    id: str  # for Slurm's commands: 12, or 12_3
    job_id: str  # SLURM_JOB_ID in its script
    name: str
    state: str  # RUNNING
    node: str
    reason: str
    index: int | None  # of an array's element

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_STATES

    @property
    def title(self) -> str:
        """Its name for users."""
        return "the service job" if self.index is None else f"worker {self.index}"

    @property
    def why(self) -> str:
        """Its state, with the reason for which it waits and a remedy."""
        if self.state != "PENDING":
            return self.state
        return with_remedy(f"{self.state}, {self.reason}")


def run_command(*words: str) -> str:
    """Return a command's output. Raise ServiceError with one line, and a remedy where known."""
    if shutil.which(words[0]) is None:
        raise ServiceError(f"{words[0]} is not installed here: run this on a login node of Slurm")
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ServiceError(
            f"{words[0]} did not answer within {TIMEOUT_S:.0f} s: `scontrol ping` asks slurmctld"
        ) from error
    if done.returncode != 0:
        lines = done.stderr.split("\n") if done.stderr else [f"exit code {done.returncode}"]
        said = "; ".join(line.removeprefix(f"{words[0]}: error: ") for line in lines if line)
        raise ServiceError(with_remedy(f"{words[0]}: {one_line(said, MAX_REASON_BYTES)}"))
    return done.stdout


def submit(script: Path, *options: str) -> str:
    """Submit a script and return the id of its job. Raise ServiceError when Slurm refuses it."""
    return run_command("sbatch", "--parsable", *options, str(script)).strip().partition(";")[0]


def jobs_named(*names: str) -> list[Job]:
    """Return this user's jobs with these names, ended ones of the last minutes too."""
    form = "%i|%A|%j|%T|%N|%K|%r"
    lines = run_command(
        "squeue", "--me", "-h", "-r", "-t", "all", "-n", ",".join(names), "-o", form
    )
    return [_parsed(line) for line in lines.splitlines()]


def let_leave(job: Job) -> None:
    """Let a running job's script end its process and itself; cancel a job that waits."""
    if job.state == "RUNNING":
        run_command("scancel", "--signal=USR2", "--batch", job.id)
    else:
        run_command("scancel", job.id)


def cancel(jobs: Sequence[Job]) -> None:
    """End jobs at once."""
    if jobs:
        run_command("scancel", *(job.id for job in jobs))


def controller_host() -> str:
    """Return the address or name of slurmctld's host. Raise ServiceError without one."""
    text = run_command("scontrol", "show", "config")
    found = re.search(r"^SlurmctldHost(?:\[0\])?\s*=\s*([^\s(]+)(?:\(([^)]+)\))?", text, re.M)
    if found is None:
        raise ServiceError("`scontrol show config` names no SlurmctldHost: give --interface")
    return found.group(2) or found.group(1)


def with_remedy(reason: str) -> str:
    """Return a reason of Slurm's with what to do, where that is known."""
    remedies = (text for part, text in REMEDIES.items() if part.lower() in reason.lower())
    remedy = next(remedies, "")
    return f"{reason}; {remedy}" if remedy else reason


def _parsed(line: str) -> Job:
    job, job_id, name, state, node, index, reason = line.split("|", 6)
    return Job(job, job_id, name, state, node, reason, int(index) if index.isdigit() else None)
