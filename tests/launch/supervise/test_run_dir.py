import os
from pathlib import Path

import pytest

from tandem.launch.supervise.run_dir import make_run_dir
from tandem.runtime.errors import ConfigError


def test_a_new_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = make_run_dir(tmp_path / "a" / "b")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert make_run_dir(folder) == folder


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod go-w {tmp_path}") as caught:
        make_run_dir(tmp_path)
    assert caught.value.param == "--run-dir"


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"another user, uid {owner}"):
        make_run_dir(tmp_path)
