"""The folder of one launch: logs, config files and the stores of NATS and etcd."""

import os
import stat
from pathlib import Path

from tandem.runtime.errors import ConfigError
from tandem.runtime.local.temporary_folder import TemporaryFolder

NUM_KEPT = 10  # folders of launches that have ended
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_run_dir(wanted: Path | None, option: str = "--run-dir") -> Path:
    """Return the folder, by default a new temporary one; others than its owner cannot enter it.

    A temporary one stays when this process has ended, until there are `NUM_KEPT` newer ones.
    Raise ConfigError for a folder of another user, and for one that others can write to; `option`
    is the one that named it.
    """
    if wanted is None:
        return TemporaryFolder("run", keep=NUM_KEPT).path
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = wanted.stat()
    except OSError as exc:
        raise _refused(option, wanted, exc.strerror or str(exc)) from exc
    if found.st_uid != os.geteuid():
        raise _refused(
            option, wanted, f"belongs to another user, uid {found.st_uid}; name another folder"
        )
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise _refused(option, wanted, f"can be written to by other users: chmod go-w {wanted}")
    return wanted.resolve()


def _refused(option: str, wanted: Path, reason: str) -> ConfigError:
    return ConfigError(f"{option} {wanted}: {reason}", param=option)
