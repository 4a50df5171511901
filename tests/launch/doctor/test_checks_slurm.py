from pathlib import Path

import pytest

from tandem.launch.doctor.checks_slurm import check_slurm


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "slurm.conf").touch()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, text in {
        "scontrol": "echo 'SlurmctldHost[0] = ctl(10.0.0.1)'",
        "sinfo": 'echo n1; [ "$6" = idle ] || echo n2',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_a_login_node_shows_the_controller_and_its_idle_nodes(tools: Path) -> None:
    (finding,) = check_slurm()
    assert finding.grade == "ok"
    assert finding.detail == "slurmctld on 10.0.0.1 answers; 1 of 2 nodes are idle"


def test_a_controller_that_does_not_answer_is_a_warning(tools: Path) -> None:
    (tools / "scontrol").write_text("#!/bin/bash\necho 'Unable to contact slurm' >&2; exit 1\n")
    (finding,) = check_slurm()
    assert finding.grade == "warn" and "slurmctld does not answer" in finding.detail


def test_without_a_config_of_slurm_nothing_is_said(tools: Path) -> None:
    (tools / "slurm.conf").unlink()
    assert not list(check_slurm())
