"""The home of the user, also of one without a home: state and caches are kept below it."""

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path


def writable_home() -> Path:
    """Return the user's home; where it cannot be written to, their private folder in TMPDIR.

    Raise OSError where that folder cannot be made, or belongs to another user.
    """
    home = _home()
    return home if home is not None and _can_write(home) else _private_folder()


def give_home(warn: Callable[[str], object]) -> None:
    """Set HOME to `writable_home()` for this process, its children and the libraries of both.

    A container may run as any user, without a home or the right to write to it. Call `warn` with
    one sentence when HOME changes, or when there is no home at all.
    """
    found = _home()
    why = "this user has no home" if found is None else f"the home {found} cannot be written to"
    try:
        home = writable_home()
    except OSError as error:
        warn(f"{why}, so state and caches are not kept: {error}")
        return
    if home == found:
        return
    if found is not None and os.path.isdir(downloads := found / ".cache" / "huggingface"):
        os.environ.setdefault("HF_HOME", str(downloads))  # models that came with an image
    os.environ["HOME"] = str(home)
    warn(f"{why}: state and caches are kept in {home}")


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:  # HOME is not set, and the user has no entry in passwd
        return None


def _can_write(folder: Path) -> bool:
    """Return True for a folder that can be written to, or made."""
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def _private_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"tandem-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} belongs to another user, or others can write to it")
    return folder
