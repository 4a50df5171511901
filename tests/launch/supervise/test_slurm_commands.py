"""Slurm's commands and what is said when one fails."""

from pathlib import Path

import pytest

from tandem.launch.supervise import slurm_commands as commands
from tandem.launch.supervise.slurm_commands import (
    Job,
    controller_host,
    jobs_named,
    run_command,
    submit,
)
from tandem.runtime.errors import ServiceError


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the only programs of the test."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def program(tools: Path, name: str, text: str) -> None:
    (tools / name).write_text(f"#!/bin/bash\n{text}\n")
    (tools / name).chmod(0o755)


def test_without_slurm_one_line_says_where_to_run_it() -> None:
    with pytest.raises(ServiceError, match=r"^tandem-no-such is not installed here: run this on a"):
        run_command("tandem-no-such")


def test_a_command_that_hangs_is_given_up(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tools, "squeue", "exec sleep 60")
    monkeypatch.setattr(commands, "TIMEOUT_S", 0.2)
    with pytest.raises(ServiceError, match=r"^squeue did not answer within 0 s: `scontrol ping`"):
        jobs_named("tandem")


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("invalid partition specified: x", "`sinfo` lists the partitions"),
        ("Unable to contact slurm controller", "slurmctld does not answer"),
        ("Invalid account or account/partition combination", "lists yours"),
    ],
)
def test_what_slurm_refuses_is_one_line_with_a_remedy(tools: Path, said: str, remedy: str) -> None:
    program(tools, "sbatch", f"echo 'sbatch: error: {said}' >&2; echo more >&2; exit 1")
    with pytest.raises(ServiceError) as refused:
        submit(tools / "x.sh")
    assert refused.value.message.startswith(f"sbatch: {said}; more; ")
    assert remedy in refused.value.message and "\n" not in refused.value.message


def test_jobs_are_read_with_the_reason_for_which_they_wait(tools: Path) -> None:
    lines = (
        "1|1|tandem|RUNNING|n1|N/A|None",
        "2_3|2|tandem-worker|PENDING||3|Resources",
        "2_1|4|tandem-worker|NODE_FAIL|n2|1|NodeFail",
    )
    program(tools, "squeue", "\n".join(f"echo '{line}'" for line in lines))
    service, waits, lost = jobs_named("tandem", "tandem-worker")
    assert service == Job("1", "1", "tandem", "RUNNING", "n1", "None", None)
    assert (service.title, waits.title, waits.id) == ("the service job", "worker 3", "2_3")
    assert waits.why == "PENDING, Resources; the partition is full: `squeue` shows by whom"
    assert waits.is_live and not lost.is_live


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("SlurmctldHost[0]        = ctl(10.0.0.1)", "10.0.0.1"),
        ("SlurmctldHost           = ctl", "ctl"),
    ],
)
def test_the_controllers_host_is_read_from_its_config(tools: Path, line: str, host: str) -> None:
    program(tools, "scontrol", f"echo 'SlurmctldPort = 6817'; echo '{line}'")
    assert controller_host() == host
