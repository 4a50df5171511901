"""`tandem doctor MODEL`: the code that would serve a model, and the memory that it takes."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tandem.engine.config import EngineConfig
from tandem.models.paths import resolve_model
from tandem.runtime.errors import TandemError
from tandem.runtime.local.findings import Finding, fail, ok, warn
from tandem.runtime.membership.model_files import REQUIRED

if TYPE_CHECKING:  # torch may be missing
    from tandem.engine.architecture.config import ModelConfig

GIB = 2**30


def check_model(model: str, engine: EngineConfig) -> Iterator[Finding]:
    """Yield findings about a model, a folder or a hub id, without reading its weights."""
    # Not at the top: doctor also reports that torch is missing.
    import torch

    from tandem.engine.execution.model_code import choose_model_config
    from tandem.engine.execution.resolve import resolve
    from tandem.engine.weights.checkpoint import Checkpoint

    try:
        folder = resolve_model(model)
        stored = choose_model_config(folder, engine.model_impl)
        resolved, config = resolve(engine, stored)
    except TandemError as error:
        yield fail("model", error.message, "see docs/models.md for the models that are served")
        return
    code = config.architecture.code or "native"
    form = f", {stored.quantization.name}" if stored.quantization else ""
    yield ok("model", f"{config.architecture.name}, {code}{form}, runs in {config.dtype}")
    yield from _check_files(folder)
    try:
        has_weights = any(folder.glob("*.safetensors"))
        weights_bytes = (
            Checkpoint(folder).num_bytes(getattr(torch, config.dtype)) if has_weights else 0
        )
    except TandemError as error:
        yield fail("model files", error.message, "copy the whole folder")
        return
    yield _check_memory(engine, resolved, config, weights_bytes)


def _check_memory(
    engine: EngineConfig, resolved: EngineConfig, config: "ModelConfig", weights_bytes: int
) -> Finding:
    """Return the tokens that fit beside the weights; a failure where not even one block does."""
    import torch

    from tandem.engine.architecture.shard import Shard
    from tandem.engine.memory.kv_blocks import bytes_per_token

    device = torch.device(resolved.device)
    if device.type == "cuda":
        if resolved.tp > 1:  # with as many GPUs, of which each has a share
            weights_bytes //= resolved.tp
            config = Shard(config, resolved.tp, 0).config
        total = torch.cuda.mem_get_info(device)[1]
        budget = int(total * engine.kv_memory_fraction) - weights_bytes
        asked = budget
    else:
        total = int(psutil.virtual_memory().available)
        budget = total - weights_bytes
        asked = min(budget, engine.kv_memory_bytes)
    longest = resolved.max_model_len or config.max_position_embeddings
    first_bytes, token_bytes = bytes_per_token(config, 1), bytes_per_token(config, longest)
    kv = f"{first_bytes:,} bytes of KV per token"
    if token_bytes < first_bytes:
        kv += f", {token_bytes:,} in sequences of {longest:,} as windows pass"
    sizes = (
        f"{weights_bytes / GIB:.2f} GiB of weights, {kv}; "
        f"on {resolved.device} {max(0, budget) // token_bytes:,} tokens fit beside the weights"
    )
    if asked < first_bytes * (resolved.block_size or 1):
        return fail(
            "model memory",
            sizes,
            "use a device with more memory, several by --tp, or a smaller model",
        )
    return ok("model memory", f"{sizes}, {asked // token_bytes:,} as configured")


def _check_files(folder: Path) -> Iterator[Finding]:
    missing = [name for name in REQUIRED if not (folder / name).is_file()]
    if missing:
        yield fail("model files", f"{folder} has no {', '.join(missing)}", "copy the whole folder")
    if not any(folder.glob("*.safetensors")):
        yield warn(
            "model files", f"{folder} has no *.safetensors", "convert the weights to safetensors"
        )
