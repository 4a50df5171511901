"""A model folder to load and to serve, written once for the sections of a run."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tandem.bench.engine.setting import FOLDER_VARIABLE
from tandem.bench.report.setting import Setting
from tandem.bench.stack.near_zero import write_near_zero_model
from tandem.models.random_model import PRESETS, ModelShape, write_shape

SHARD_BYTES = 1 << 29
# Of Qwen3-1.7B: 3.4 GB, of which two processes hold a copy each beside their KV.
SHAPE = replace(PRESETS["qwen3-0.6b"], hidden_size=2048, intermediate_size=6144)
TINY_SHAPE = PRESETS["near-zero"]


def shape_on_disk(setting: Setting) -> ModelShape:
    """Return the shape of the model that is written."""
    return TINY_SHAPE if setting.is_dry else SHAPE


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """Yield the folder that the run's sections share, else a temporary one."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given is not None:
        yield Path(given)
        return
    with tempfile.TemporaryDirectory(prefix="tandem-engine-") as folder:
        yield Path(folder)


def written_model(folder: Path, setting: Setting) -> Path:
    """Return the model in `folder`, written there if no section has done so."""
    path = folder / "model"
    if path.is_dir():
        return path
    unfinished = folder / "model.unfinished"
    if setting.is_dry:
        write_near_zero_model(unfinished, TINY_SHAPE)
    else:
        write_shape(unfinished, SHAPE, seed=0, max_shard_bytes=SHARD_BYTES)
    return unfinished.rename(path)
