"""Users without a home: what is kept for them, and where."""

import os
import stat
from pathlib import Path

import pytest

from tandem.runtime.local import home
from tandem.runtime.local.home import give_home, writable_home
from tandem.runtime.local.local_clusters import LocalCluster, announced, running_clusters, started_s


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder that stands for a home, not made yet."""
    for name in ("XDG_STATE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # also after the test, where it is not set now
    monkeypatch.setattr(home.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", "/changed by the test")  # and put back after it
    return tmp_path / f"tandem-{os.geteuid()}"


def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """HOME is not set, and passwd does not have the user."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: os.environ.get("HOME", path))


def own_cluster() -> LocalCluster:
    pid = os.getpid()
    return LocalCluster(pid, started_s(pid), "a", "nats://x", "unix:///y", "", "/r")


@pytest.mark.parametrize("kept", [".", "not/made/yet"])
def test_a_home_that_can_be_written_is_kept(
    kept: str, private: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    warnings: list[str] = []
    monkeypatch.setenv("HOME", str(tmp_path / kept))
    give_home(warnings.append)
    assert os.environ["HOME"] == str(tmp_path / kept)
    assert warnings == []
    assert not private.exists()


@pytest.mark.parametrize("found", ["none", "a file", "below a file"])
def test_without_one_state_and_caches_have_a_private_folder_and_one_warning(
    found: str, private: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    warnings: list[str] = []
    if found == "none":
        without_home(monkeypatch)
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("HOME", str(tmp_path / ("file" if found == "a file" else "file/x")))
    with announced(own_cluster()):
        give_home(warnings.append)
        (warning,) = warnings
        assert warning.endswith(f"state and caches are kept in {private}")
        assert os.environ["HOME"] == str(private)
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert running_clusters() == [own_cluster()]
        give_home(warnings.append)
        assert len(warnings) == 1  # children have a home


@pytest.mark.parametrize("kind", ["link", "writable"])
def test_a_private_folder_that_another_user_may_have_made_is_not_used(
    kind: str, private: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_home(monkeypatch)
    if kind == "link":
        private.symlink_to(tmp_path)
    else:
        private.mkdir()
        private.chmod(0o777)
    with pytest.raises(PermissionError, match="belongs to another user, or others can write"):
        writable_home()
    warnings: list[str] = []
    give_home(warnings.append)
    assert "state and caches are not kept" in warnings[0]
    with announced(own_cluster(), warnings.append):
        assert "it cannot be listed" in warnings[1]
        assert running_clusters() == []


def test_models_of_a_home_that_is_read_only_are_still_found(
    private: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    downloads = tmp_path / "home" / ".cache" / "huggingface"
    downloads.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(home, "_can_write", lambda _: False)
    give_home(lambda _: None)
    assert os.environ["HF_HOME"] == str(downloads)
