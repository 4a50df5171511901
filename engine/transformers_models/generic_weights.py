"""Decoders of transformers with their weights, from a folder."""

from pathlib import Path
from typing import Any

import torch
from transformers.initialization import no_init_weights

from tandem.engine.transformers_models.generic_attention import INTERFACE
from tandem.engine.transformers_models.generic_build import (
    on_meta,
    probe,
    served,
    transformers_config,
    translated,
)
from tandem.engine.transformers_models.generic_parts import Siblings
from tandem.engine.weights.checkpoint import Checkpoint
from tandem.engine.weights.weight_readers import Target, cut, lane_for, num_readers, read_pieces
from tandem.runtime.errors import ModelError


def build_generic(
    folder: str | Path, dtype: torch.dtype, device: torch.device
) -> tuple[Any, list[tuple[str, ...]]]:
    """Return the module with its weights on `device`, and its linear modules of common inputs.

    Raises ModelError naming what is missing.
    """
    with translated(Path(folder)):
        return _build(Path(folder) / "config.json", dtype, device)


def _build(
    path: Path, dtype: torch.dtype, device: torch.device
) -> tuple[Any, list[tuple[str, ...]]]:
    config = transformers_config(path)
    checkpoint = Checkpoint(path.parent)
    names = set(checkpoint)
    meta = on_meta(path, config)
    found = Siblings(meta)
    probe(path, meta)
    siblings = found.close()
    tied = set(meta.all_tied_weights_keys)
    wanted = {name for name, _ in meta.named_parameters()} - tied
    if not wanted <= names:
        model = _by_conversion(path, type(meta), config, dtype).to(device)
        return _checked(path, model), siblings
    for name, source in meta.all_tied_weights_keys.items():
        checkpoint.check_tied(name, source)
    with torch.device(device), no_init_weights():
        model = type(meta)._from_config(config, dtype=dtype, attn_implementation=INTERFACE)
    model.tie_weights()
    targets = {name: p for name, p in model.named_parameters() if name in wanted}
    pieces = cut(
        Target(checkpoint.find(name, *target.shape), target.data)
        for name, target in targets.items()
    )
    lanes = [lane_for(device) for _ in range(min(num_readers(), len(pieces)))]
    read_pieces(pieces, lanes, lambda num_bytes: None)
    for name, buffer in model.named_buffers():
        if name in names:
            stored = checkpoint.find(name, *buffer.shape)
            read_pieces(cut([Target(stored, buffer)]), lanes[:1], lambda num_bytes: None)
    return _checked(path, model), siblings


def _by_conversion(path: Path, kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """Load a checkpoint whose names differ from the module's, by transformers' own mapping."""
    model, info = kind.from_pretrained(
        path.parent,
        config=config,
        dtype=dtype,
        attn_implementation=INTERFACE,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,  # no code of a model's folder is ever run
        output_loading_info=True,
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{path.parent}: no safetensors file has tensor {missing[0]}", param=missing[0]
        )
    return model


def _checked(path: Path, model: Any) -> Any:
    """Return `model`, whose numbers are all finite."""
    for name, parameter in model.named_parameters():
        if not bool(torch.stack(torch.aminmax(parameter.detach())).isfinite().all()):
            raise ModelError(f"{path.parent}: not all numbers are finite in {name}", param=name)
    return served(model)
