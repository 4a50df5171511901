"""Weights from their files to the device, held against reading these files."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tandem.bench.engine.model import work_folder, written_model
from tandem.bench.engine.setting import num_rounds
from tandem.bench.report.figures import Figure
from tandem.bench.report.setting import Setting, seconds_of, synchronize
from tandem.engine.models.config import load_model_config
from tandem.engine.models.weights import load_weights

PIECE_BYTES = 16 << 20


def run(setting: Setting) -> Iterator[Figure]:
    """Read and load in turns, each after the files' pages were dropped."""
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
            reads.append(seconds_of(lambda: read_all(files)))
            forget(files)

            def load() -> None:
                load_weights(model, config, dtype, setting.device)
                synchronize(setting)

            loads.append(seconds_of(load))
    rates = [num_bytes / seconds / 1e9 for seconds in reads]
    yield Figure("storage_read", f"read of the files, {len(files)} threads", "GB/s", tuple(rates))
    yield Figure(
        "weights_load",
        f"weights of {num_bytes / 1e9:.2g} GB, files to device",
        "GB/s",
        tuple(num_bytes / seconds / 1e9 for seconds in loads),
        ceiling=max(rates),
    )


def forget(files: Sequence[Path]) -> None:
    """Drop the files' pages from the page cache, as far as the file system does."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(files: Sequence[Path]) -> int:
    """Read every byte, by a thread for each file; return their number."""

    def read(path: Path) -> int:
        buffer = bytearray(PIECE_BYTES)
        with path.open("rb", buffering=0) as file:
            return sum(iter(lambda: file.readinto(buffer) or 0, 0))

    with ThreadPoolExecutor(len(files)) as readers:
        return sum(readers.map(read, files))
