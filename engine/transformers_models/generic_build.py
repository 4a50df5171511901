"""Decoders of transformers: from a folder to sizes, with reasons for a refusal, and to a module."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.ends import eos_token_ids
from tandem.engine.architecture.json_file import MOST, JsonObject, read_json
from tandem.engine.architecture.layer_kinds import LayerKind
from tandem.engine.architecture.rope_config import RopeConfig, extended_positions
from tandem.engine.architecture.spec import Architecture
from tandem.engine.transformers_models.generic_attention import INTERFACE, AttentionCall, attend
from tandem.engine.transformers_models.generic_masks import PROBE, is_window
from tandem.engine.weights.checkpoint import Checkpoint
from tandem.runtime.errors import ModelError, TandemError
from tandem.runtime.membership.folder_files import weight_files
from tandem.runtime.printable import one_line
from tandem.runtime.wire.dtypes import ELEMENT_BYTES

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 3
_MAX_REASON_BYTES = 512
_ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
# Their angles depend on the longest sequence of a batch beyond the original context.
_ROPE_BY_LENGTH = {"dynamic", "longrope"}


class _Called(NamedTuple):
    """One layer's attention in the probe, with its sizes."""

    call: AttentionCall
    heads: int
    kv_heads: int
    key_size: int
    value_size: int


class _Probe:
    """Attention that computes nothing and records each layer's call with its sizes."""

    def __init__(self) -> None:
        self.calls: list[_Called] = []

    def __call__(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        self.calls.append(_Called(call, q.shape[1], k.shape[1], q.shape[2], v.shape[2]))
        return q.new_empty(*q.shape[:2], v.shape[2])


@contextmanager
def translated(folder: Path) -> Iterator[None]:
    """Raise what transformers and its models raise of a folder's values as ModelError."""
    try:
        yield
    except (TandemError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # they have no common error
        reason = one_line(str(error) or type(error).__name__, _MAX_REASON_BYTES)
        raise ModelError(f"{folder}: transformers {version()} cannot load it: {reason}") from error


def load_generic_config(folder: str | Path) -> ModelConfig:
    """Return the sizes of the model in `folder`, from a pass of its modelling code on no device.

    Raises ModelError naming the layer and the reason for a model that cannot be served.
    """
    with translated(Path(folder)):
        return _load_config(Path(folder) / "config.json")


def _load_config(path: Path) -> ModelConfig:
    config = transformers_config(path)
    model = on_meta(path, config)
    _refuse_state(path, config, model)
    _refuse_sizes(path, model)
    calls = probe(path, model)
    num_layers, max_positions = config.num_hidden_layers, _max_positions(path, config)
    _refuse_calls(path, config, num_layers, calls)
    _refuse_masks(path, config, calls, max_positions)
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    if dtype not in ELEMENT_BYTES:
        raise ModelError(f"{path}: dtype: {dtype} is not supported", param="dtype")
    head_dim = max(max(each.key_size, each.value_size) for each in calls)
    _check_size(path, "num_hidden_layers", num_layers)
    _check_size(path, "head_dim", head_dim)
    name = type(model).__name__
    return ModelConfig(
        architecture=Architecture(name, config.model_type, (), code=f"transformers {version()}"),
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or config.hidden_size,
        num_layers=num_layers,
        num_heads=calls[0].heads,
        num_kv_heads=calls[0].kv_heads,
        head_dim=head_dim + head_dim % 2,
        vocab_size=config.vocab_size,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-6,  # like `rope`, of no use: transformers' own code computes both
        rope=RopeConfig(1.0),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        eos_token_ids=eos_token_ids([read_json(path)], path.parent),
        dtype=dtype,
        layer_kinds=_layer_kinds(calls, max_positions),
    )


def _layer_kinds(calls: list[_Called], longest: int) -> tuple[LayerKind, ...]:
    """Return the kind of each layer, if some have a window; the layers rotate by themselves."""
    windows = [each.call.window if each.call.window < longest else 0 for each in calls]
    return tuple(LayerKind(None, window) for window in windows) if any(windows) else ()


def transformers_config(path: Path) -> Any:
    """Return transformers' configuration of a decoder of text. Raise ModelError for another."""
    data = read_json(path).data
    if data.get("quantization_config"):
        raise ModelError(
            f"{path}: quantization_config: is set, which model_impl transformers does not support",
            param="quantization_config",
        )
    names = data.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if data.get("is_encoder_decoder"):
        raise _refused(path, name, "it is an encoder with a decoder; only decoders are served")
    if not isinstance(name, str) or name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise _refused(path, name, f"it is no decoder of text in transformers {version()}")
    try:
        config = transformers.AutoConfig.from_pretrained(
            path.parent,
            local_files_only=True,
            trust_remote_code=False,  # no code of a model's folder is ever run
        )
    except Exception as error:  # its readers and validators raise what they like
        raise ModelError(f"{path}: transformers {version()}: {error}") from error
    for key, most in MOST.items():
        if isinstance(value := getattr(config, key, None), int) and value > most:
            raise ModelError(f"{path}: {key}: {value} is above {most}", param=key)
    if config.get_text_config() is not config:
        raise _refused(path, name, "it takes more than text")
    return config


def on_meta(path: Path, config: Any) -> Any:
    """Return the module on no device. Raise ModelError where it cannot be built."""
    name = read_json(path).data["architectures"][0]
    try:
        with torch.device("meta"), no_init_weights():
            model = getattr(transformers, name)._from_config(config, attn_implementation=PROBE)
    except Exception as error:
        raise _refused(path, name, f"transformers cannot build it: {error}") from error
    return served(model)


def served(model: Any) -> Any:
    """Return `model` with Tandem's experts, and without a look at its inputs on the host."""
    model.config._experts_implementation = INTERFACE
    model.config.pad_token_id = None  # else a pass looks for padding in the tokens
    return model.eval().requires_grad_(False)


def _refuse_state(path: Path, config: Any, model: Any) -> None:
    """Refuse layers that carry something from token to token beside keys and values."""
    part = next(_stateful_parts(config, model), None)
    if part is not None:
        raise _refused(path, type(model).__name__, f"{part} has state outside of attention")


def _stateful_parts(config: Any, model: Any) -> Iterator[str]:
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in _ATTENTION_KINDS:
            yield f"layer {layer} ({kind})"
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            owner = name.rpartition(".")[0]
            yield f"{owner} ({type(model.get_submodule(owner)).__name__})"
    if getattr(model, "_is_stateful", False):
        yield "it"


def _refuse_sizes(path: Path, model: Any) -> None:
    """Refuse a model of more numbers than its files have, if there are any, before it is tried."""
    if not weight_files(path.parent):
        return
    tied = set(model.all_tied_weights_keys)
    num_asked = sum(each.numel() for name, each in model.named_parameters() if name not in tied)
    num_stored = Checkpoint(path.parent).num_bytes(torch.int8)  # one byte for each number
    if num_asked > num_stored:
        raise ModelError(
            f"{path}: implies {num_asked} numbers of weights, the files have {num_stored}"
        )


@torch.no_grad()  # inference mode would not count the writes to a tensor
def probe(path: Path, model: Any) -> list[_Called]:
    """Return the calls of a pass of the model on no device. Raise ModelError where it fails."""
    attention = _Probe()
    token = attend.set(attention)
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device="meta")
    try:
        # With a mask of its caller's a family looks for no borders of sequences in the positions.
        model(input_ids=tokens, position_ids=tokens, attention_mask=tokens, use_cache=False)
    except Exception as error:
        calls = attention.calls
        at = f"after layer {len(calls) - 1}" if calls else "before its first attention"
        raise _refused(
            path, type(model).__name__, f"its pass over a flat batch fails {at}: {error}"
        ) from error
    finally:
        attend.reset(token)
    return attention.calls


def _refuse_calls(path: Path, config: Any, num_layers: int, calls: list[_Called]) -> None:
    name = config.architectures[0]
    seen = [call.layer for call, *_ in calls]
    for layer in range(num_layers):
        if seen[layer : layer + 1] != [layer]:
            kinds = getattr(config, "layer_types", None) or ()
            kind = kinds[layer] if layer < len(kinds) else config.model_type
            raise _refused(
                path,
                name,
                f"layer {layer} ({kind}) does not compute attention through "
                "transformers' attention interface",
            )
    if len(seen) > num_layers:
        raise _refused(path, name, f"layer {seen[num_layers]} attends more than once")
    for call, heads, kv_heads, _, _ in calls:
        if call.unsupported:
            raise _refused(path, name, f"layer {call.layer} needs {call.unsupported}")
        if (heads, kv_heads) != (calls[0].heads, calls[0].kv_heads):
            raise _refused(
                path, name, f"layer {call.layer} has {kv_heads} KV heads of {heads}, others differ"
            )


def _refuse_masks(path: Path, config: Any, calls: list[_Called], longest: int) -> None:
    """Refuse layers whose masks hide or show other positions than attention is asked for."""
    kinds = getattr(config, "layer_types", None) or ()
    for call, *_ in calls:
        is_same = None if call.rule is None else is_window(call.rule, call.window, longest)
        is_chunk = kinds[call.layer : call.layer + 1] == ["chunked_attention"]
        if is_same or (is_same is None and is_chunk):  # which no sequence is longer than
            continue
        asked = f"a window of {call.window}" if call.window else "all positions before"
        raise _refused(
            path,
            config.architectures[0],
            f"layer {call.layer} asks attention for {asked}, and its mask is another",
        )


def _max_positions(path: Path, config: Any) -> int:
    """Return the positions of the model, fewer where its attention or angles change beyond."""
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if not isinstance(most, int) or most <= 0:
        raise ModelError(
            f"{path}: max_position_embeddings: missing", param="max_position_embeddings"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    parts = (rope, *(each for each in rope.values() if isinstance(each, dict)))
    given = JsonObject(path, {})
    for part in parts:
        if part.get("rope_type") == "yarn":
            yarn = given.with_changes(part)
            original = yarn.positive("original_max_position_embeddings", most)
            most = extended_positions(most, original, yarn.number("factor", 1.0))
    limit, reason = most, ""
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        limit, reason = min(limit, chunk), "layers attend in chunks of that many tokens"
    for part in parts:
        if part.get("rope_type") in _ROPE_BY_LENGTH:
            original = part.get("original_max_position_embeddings") or most
            limit, reason = min(limit, original), f"{part['rope_type']} angles change beyond"
    if limit < most:
        logger.warning("%s: at most %d of %d tokens: %s", path.parent, limit, most, reason)
    return _check_size(path, "max_position_embeddings", limit)


def _check_size(path: Path, key: str, value: int) -> int:
    if not 0 < value <= MOST[key]:
        raise ModelError(f"{path}: {key}: {value} is not in 1..{MOST[key]}", param=key)
    return value


def _refused(path: Path, name: object, reason: str) -> ModelError:
    return ModelError(f"{path}: architectures: {name!r}: {reason}", param="architectures")


def version() -> str:
    """Return the version of transformers."""
    return str(transformers.__version__)
