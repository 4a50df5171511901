"""The kernels of a model's steps, built on all cores and once on a machine, before the warm-up."""

import dataclasses
import logging
import os
import time
from pathlib import Path
from typing import TypeVar

import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.rope import rope_tables
from tandem.engine.config import EngineConfig
from tandem.engine.decoder.decoder import Model
from tandem.engine.decoder.kernel_set import Kernels
from tandem.engine.execution.profile import StepProfile
from tandem.engine.weights.weights import ModelWeights
from tandem.kernels.alone import alone_on_this_machine

logger = logging.getLogger(__name__)

META = torch.device("meta")

T = TypeVar("T")


def prebuild(
    config: EngineConfig,
    model_config: ModelConfig,
    weights: ModelWeights,
    kernels: Kernels,
    longest: int,
    share: ModelConfig | None = None,
) -> None:
    """Build, or load from Triton's cache, the kernels of all steps of a model in native code.

    `weights` and KV are those of `share`, None: of the model. The steps run over tensors without
    memory. While another process of this machine builds into
    the same cache, this one waits, and then finds the builds there.
    """
    from tandem.kernels.building import building  # Triton exists on Linux only

    dtype = getattr(torch, model_config.dtype)
    tables = rope_tables(model_config, longest, dtype, META)
    model = Model(share or model_config, on_meta(weights), tables, kernels)
    profile = StepProfile(config, model_config, model, kernels, longest, META, None, share)
    with alone_on_this_machine(cache_folder()):
        started = time.perf_counter()
        with building(len(os.sched_getaffinity(0))):
            profile.warm_up()
            if config.cuda_graphs:
                profile.run_recorded()
    logger.info("kernels built in %.1f s", time.perf_counter() - started)


def cache_folder() -> Path:
    """Return the folder in which Triton keeps its builds."""
    import triton

    return Path(triton.knobs.cache.dir)


def on_meta(value: T) -> T:
    """Return a dataclass, tuple or tensor with every tensor in it replaced by one without memory.

    One tensor in two places remains one.
    """
    return _on_meta(value, {})


def _on_meta(value: T, known: dict[int, object]) -> T:
    if id(value) not in known:
        known[id(value)] = _replaced(value, known)
    return known[id(value)]  # type: ignore[return-value]


def _replaced(value: object, known: dict[int, object]) -> object:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, tuple | list):
        return type(value)(_on_meta(each, known) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        changes = {name: _on_meta(getattr(value, name), known) for name in names}
        return dataclasses.replace(value, **changes)
    return value
