"""Weights from their files to the device, held against reading these files and no more."""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tandem.bench.engine.model import work_folder, written_model
from tandem.bench.engine.setting import num_rounds
from tandem.bench.kernels.figures import Measurement
from tandem.bench.kernels.timing import Setting, synchronize
from tandem.engine.models.config import load_model_config
from tandem.engine.models.weights import load_weights

NUM_READERS = 8
PIECE_BYTES = 16 << 20


def run(setting: Setting) -> Iterator[Measurement]:
    """Reading and loading take turns, each after the kernel was told to forget the files."""
    with work_folder() as folder:
        model = written_model(folder, setting)
        config = load_model_config(model)
        dtype: torch.dtype = getattr(torch, config.dtype)
        files = sorted(model.glob("*.safetensors"))
        num_bytes = sum(path.stat().st_size for path in files)
        synchronize(setting)  # the device is there before anything is timed
        reads, loads = [], []
        for _ in range(num_rounds(setting)):
            forget(files)
            reads.append(_seconds(lambda: read_all(files)))
            forget(files)

            def load() -> None:
                load_weights(model, config, dtype, setting.device)
                synchronize(setting)

            loads.append(_seconds(load))
    rates = [num_bytes / seconds / 1e9 for seconds in reads]
    yield Measurement(
        name="storage_read",
        label=f"read of the files, {NUM_READERS} threads",
        unit="GB/s",
        values=tuple(rates),
    )
    yield Measurement(
        name="weights_load",
        label=f"weights of {num_bytes / 1e9:.2g} GB, files to device",
        unit="GB/s",
        values=tuple(num_bytes / seconds / 1e9 for seconds in loads),
        limit=max(rates),
    )


def forget(files: Sequence[Path]) -> None:
    """Drop the files' pages from the page cache, as far as the file system does."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(files: Sequence[Path]) -> int:
    """Read every byte, in pieces and by several threads; returns how many there were."""
    pieces = [
        (path, offset) for path in files for offset in range(0, path.stat().st_size, PIECE_BYTES)
    ]
    with ThreadPoolExecutor(NUM_READERS) as readers:
        return sum(readers.map(_read_pieces, [pieces[i::NUM_READERS] for i in range(NUM_READERS)]))


def _read_pieces(pieces: Sequence[tuple[Path, int]]) -> int:
    buffer, num_bytes = bytearray(PIECE_BYTES), 0
    for path, offset in pieces:
        with path.open("rb", buffering=0) as file:
            num_bytes += os.preadv(file.fileno(), [buffer], offset)
    return num_bytes


def _seconds(call: object) -> float:
    assert callable(call)
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at
