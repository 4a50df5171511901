"""The files of a model folder, which a stranger wrote: regular, of the folder, within bounds."""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from tandem.runtime.errors import ModelError
from tandem.runtime.printable import short

INDEX_NAME = "model.safetensors.index.json"
_MIB = 1 << 20
_MOST_BYTES = {
    "tokenizer.json": 128 * _MIB,
    INDEX_NAME: 64 * _MIB,
    ".json": 16 * _MIB,
    ".jinja": 1 * _MIB,
}  # by name or by its ending; weights may have any size


def open_file(path: Path) -> BinaryIO:
    """Open a file of a model folder for reading. Raise ModelError naming it, and never wait.

    A link may point within the folder, or to the files of a model in the hub's cache.
    """
    try:
        target = path.resolve(strict=True)
        if path.is_symlink() and not _is_of_model(target, path.parent.resolve()):
            raise ModelError(f"{path}: is a link to {target}, outside of the model's folder")
        # O_NONBLOCK: a pipe opens without a writer, and is then refused.
        descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    found = os.fstat(descriptor)
    most = _MOST_BYTES.get(path.name) or _MOST_BYTES.get(path.suffix)
    is_regular = stat.S_ISREG(found.st_mode)
    if is_regular and (most is None or found.st_size <= most):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    reason = f"has {found.st_size} bytes, above {most}, the most that is read"
    raise ModelError(f"{path}: {reason if is_regular else 'is not a regular file'}")


def read_file(path: Path) -> bytes:
    """Return the bytes of a file of a model folder. Raise ModelError as `open_file` does."""
    with open_file(path) as file:
        try:
            return file.read()
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror or error}") from error


def check_file(path: Path) -> None:
    """Raise ModelError as `open_file` does, for a library that opens the file itself."""
    open_file(path).close()


def is_there(path: Path) -> bool:
    """Return whether a folder has a file of this name, of whatever kind."""
    return os.path.lexists(path)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model folder. Raise ModelError naming the file."""
    try:
        found = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: not a JSON object")
    return found


def read_weight_map(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor by the index; None without one. Raise ModelError."""
    path = folder / INDEX_NAME
    if not is_there(path):
        return None
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{path}: has no weight_map", param="weight_map")
    for file_name in weight_map.values():
        is_name = isinstance(file_name, str) and file_name.isprintable()
        if not is_name or Path(file_name).name != file_name:
            raise ModelError(f"{path}: weight_map leaves the folder: {short(repr(file_name))}")
    return weight_map


def weight_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files that may have the weights. Raise ModelError.

    Those of the index, else model.safetensors, else all that there are.
    """
    weight_map = read_weight_map(folder)
    if weight_map is not None:
        return sorted(set(weight_map.values()))
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    return ["model.safetensors"] if "model.safetensors" in names else names


def _is_of_model(target: Path, folder: Path) -> bool:
    """Return whether a link's target lies in the folder, or where the hub's client keeps files."""
    store = target.parent  # models--OWNER--NAME/blobs
    is_in_cache = store.name == "blobs" and store.parent.name.startswith("models--")
    return target.is_relative_to(folder) or is_in_cache
