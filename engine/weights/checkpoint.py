"""The safetensors files of a model folder: where each tensor lies, with its shape checked."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tandem.runtime.errors import ModelError
from tandem.runtime.membership.folder_files import (
    INDEX_NAME,
    is_there,
    open_file,
    read_weight_map,
    weight_files,
)

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
CODES = {"F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32, "U8": torch.uint8, "I8": torch.int8}

_PART_BYTES = 1 << 20  # of tensors that are compared


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in its file: items of `dtype` in row-major order from `offset_bytes` on."""

    name: str
    path: Path
    dtype: torch.dtype
    offset_bytes: int


class Checkpoint:
    """The tensors of a model folder's safetensors files, single or sharded; holds no file open.

    Raises ModelError for a folder, an index or a file that cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._headers: dict[str, _Header] = {}  # file name |-> header
        self._where = self._locate()

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all tensors."""
        return iter(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of all tensors, those in floating-point numbers as `dtype`."""
        total = 0
        for name, file_name in self._where.items():
            entry = self._header(file_name).entries.get(name)
            if entry is not None:
                first, end = entry["data_offsets"]
                is_float = entry["dtype"] in FLOATS
                total += prod(entry["shape"]) * dtype.itemsize if is_float else end - first
        return total

    def shape(self, name: str, dtypes: Mapping[str, torch.dtype]) -> tuple[int, ...] | None:
        """Return the shape of a tensor of one of these dtypes; None where there is none."""
        file_name = self._where.get(name)
        entry = None if file_name is None else self._header(file_name).entries.get(name)
        return tuple(entry["shape"]) if entry and entry["dtype"] in dtypes else None

    def find(
        self, name: str, *shape: int, dtypes: Mapping[str, torch.dtype] = FLOATS
    ) -> StoredTensor:
        """Locate tensor `name`. Raises ModelError if it is missing or of another shape or type."""
        file_name = self._where.get(name)
        if file_name is None:
            raise ModelError(f"{self.folder}: no safetensors file has tensor {name}", param=name)
        header = self._header(file_name)
        entry = header.entries.get(name)
        path = self.folder / file_name
        if entry is None:
            raise ModelError(
                f"{path}: has no tensor {name}, although {INDEX_NAME} lists it there", param=name
            )
        if tuple(entry["shape"]) != shape:
            raise ModelError(
                f"{path}: tensor {name} has shape {entry['shape']}, "
                f"config.json implies {list(shape)}",
                param=name,
            )
        dtype = dtypes.get(entry["dtype"])
        if dtype is None:
            found = _dtype_name(path, name, entry["dtype"])
            raise ModelError(f"{path}: tensor {name} has dtype {found}", param=name)
        return StoredTensor(name, path, dtype, header.data_start_bytes + entry["data_offsets"][0])

    def check_tied(self, name: str, source: str) -> None:
        """Raise ModelError where both of two tied tensors are stored, with other numbers."""
        if name not in self or source not in self or self._has_same_bytes(name, source):
            return
        raise ModelError(
            f"{self.folder}: tensor {name} differs from {source}, although config.json ties them; "
            "set tie_word_embeddings to false, or take the wrong one out",
            param=name,
        )

    def _has_same_bytes(self, *names: str) -> bool:
        with ExitStack() as stack:
            files, kinds = [], []
            for name in names:
                header = self._header(self._where[name])
                entry = header.entries.get(name, {"dtype": "", "shape": [], "data_offsets": (0, 0)})
                first, end = entry["data_offsets"]
                files.append(stack.enter_context(open_file(self.folder / self._where[name])))
                files[-1].seek(header.data_start_bytes + first)
                kinds.append((entry["dtype"], entry["shape"], end - first))
            if kinds[0] != kinds[1]:
                return False
            for start in range(0, kinds[0][2], _PART_BYTES):
                num_bytes = min(_PART_BYTES, kinds[0][2] - start)
                if files[0].read(num_bytes) != files[1].read(num_bytes):
                    return False
        return True

    def _locate(self) -> dict[str, str]:
        file_names = weight_files(self.folder)
        located = read_weight_map(self.folder)
        if located is not None:
            for file_name in file_names:
                if not is_there(self.folder / file_name):
                    raise ModelError(
                        f"{self.folder / file_name}: missing, although {INDEX_NAME} names it"
                    )
            return located
        if len(file_names) > 1:
            raise ModelError(
                f"{self.folder}: which of {', '.join(file_names)} has the weights? There is no "
                f"{INDEX_NAME}: name one of them model.safetensors"
            )
        if not file_names:
            raise ModelError(f"{self.folder}: no *.safetensors file")
        [file_name] = file_names
        return dict.fromkeys(self._header(file_name).entries, file_name)

    def _header(self, file_name: str) -> "_Header":
        if file_name not in self._headers:
            self._headers[file_name] = _read_header(self.folder / file_name)
        return self._headers[file_name]


@dataclass(frozen=True, slots=True)
class _Header:
    entries: dict[str, dict[str, Any]]  # tensor name |-> its dtype, shape and data_offsets
    data_start_bytes: int


def _read_header(path: Path) -> _Header:
    """Read the header of a file; the safetensors library checks it, and the file's length."""
    try:
        with open_file(path) as file, safe_open(str(path), framework="pt"):
            num_bytes = int.from_bytes(file.read(8), "little")
            entries: dict[str, dict[str, Any]] = json.loads(file.read(num_bytes))
    except (OSError, ValueError, SafetensorError) as exc:
        raise ModelError(f"{path}: not a readable safetensors file: {exc}") from exc
    entries.pop("__metadata__", None)
    return _Header(entries, 8 + num_bytes)


def _dtype_name(path: Path, name: str, stored_as: str) -> str:
    """Return PyTorch's name of a dtype, or the file's own if PyTorch has none."""
    try:
        with safe_open(str(path), framework="pt") as opened:
            return str(opened.get_tensor(name).dtype)
    except (OSError, SafetensorError):
        return stored_as
