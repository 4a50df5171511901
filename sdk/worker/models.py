"""Telling the cluster what model an endpoint serves, so that frontends send it requests."""

import asyncio
import enum
import time
import weakref
from pathlib import Path
from typing import Any, overload

import msgspec

from tandem.runtime.discovery import model_key
from tandem.runtime.errors import ConfigError
from tandem.runtime.messages import ModelCard, ModelFiles
from tandem.runtime.model_files import MODEL_FILES_ENDPOINT, ModelFilesHolder
from tandem.sdk.worker.distributed_runtime import DistributedRuntime, Endpoint
from tandem.sdk.worker.model_folders import CONTEXT_KEYS, read_text_model, read_token_model

DEFAULT_BLOCK_SIZE = 16  # tokens


class ModelInput(enum.Enum):
    """What a worker reads: token ids, or the client's text."""

    Tokens = "tokens"
    Text = "text"


class ModelType(enum.Flag):
    """Where a model is served; `|` joins them.

    `Backend` is both of them. In the older form of `register_llm` it alone means token ids.
    """

    Chat = 1
    Completions = 2
    Completion = 2
    Backend = 7


@overload
async def register_llm(
    model_input: ModelInput,
    model_type: ModelType,
    endpoint: Endpoint,
    model_path: str | Path,
    model_name: str | None = None,
    context_length: int | None = None,
    kv_cache_block_size: int | None = None,
    *,
    migration_limit: int | None = None,
    user_data: dict[str, Any] | None = None,
    custom_template_path: str | Path | None = None,
    sends_kv_events: bool = False,
    total_kv_blocks: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
) -> None: ...


@overload
async def register_llm(
    model_type: ModelType,
    endpoint: Endpoint,
    model_path: str | Path,
    model_name: str | None = None,
    context_length: int | None = None,
    kv_cache_block_size: int | None = None,
    *,
    migration_limit: int | None = None,
    user_data: dict[str, Any] | None = None,
) -> None: ...


async def register_llm(*args: Any, **kwargs: Any) -> None:
    """Makes a model known under a name; it is served as long as an instance of `endpoint` is.

    `model_path` is a hub id ("owner/name", also "hf://owner/name"), a folder with config.json and
    tokenizer.json, or the bundled model's name; of a text model nothing is read and any name does.
    `model_name` is what clients ask for: by default the hub id or the folder's name.
    `context_length` (tokens) is by default the model's; `kv_cache_block_size` (tokens) 16.
    `migration_limit`: how often an answer may go on at another worker, by default the frontend's.
    `user_data`: any JSON, for whoever reads the card. `custom_template_path`: a Jinja file instead
    of the model's chat template.

    The older form has no `model_input`: there `ModelType.Backend` reads tokens, others text.

    Raises ConfigError naming a wrong argument, ModelError naming what a model folder lacks.
    """
    if "model_input" not in kwargs and not (args and isinstance(args[0], ModelInput)):
        args = (None, *args)
    await _register(*args, **kwargs)


register_model = register_llm


_holders: "weakref.WeakKeyDictionary[DistributedRuntime, ModelFilesHolder]" = (
    weakref.WeakKeyDictionary()
)


async def _register(
    model_input: ModelInput | None,
    model_type: ModelType,
    endpoint: Endpoint,
    model_path: str | Path,
    model_name: str | None = None,
    context_length: int | None = None,
    kv_cache_block_size: int | None = None,
    *,
    migration_limit: int | None = None,
    user_data: dict[str, Any] | None = None,
    custom_template_path: str | Path | None = None,
    sends_kv_events: bool = False,
    total_kv_blocks: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
) -> None:
    _check_kinds(model_input, model_type, endpoint)
    if model_name is not None and not (isinstance(model_name, str) and model_name):
        raise ConfigError(f"model_name is {model_name!r}, not a name", param="model_name")
    _check_at_least("context_length", context_length, 1)
    _check_at_least("kv_cache_block_size", kv_cache_block_size, 1)
    _check_at_least("migration_limit", migration_limit, 0)
    if model_input is None:
        is_backend = ModelType.Backend in model_type
        model_input = ModelInput.Tokens if is_backend else ModelInput.Text
    read = read_token_model if model_input is ModelInput.Tokens else read_text_model
    model = await asyncio.to_thread(read, model_path, custom_template_path)
    runtime = endpoint.runtime
    card = ModelCard(
        name=model_name or model.name,
        context_length=_context_length(model_input, context_length or model.context_length),
        block_size=kv_cache_block_size or DEFAULT_BLOCK_SIZE,
        vocab_size=model.vocab_size,
        files_digest="" if model.files is None else _hand_out(runtime, model.files),
        instance_id=runtime.instance_id,
        created_s=int(time.time()),
        endpoint=str(endpoint.address),
        model_input="tokens" if model_input is ModelInput.Tokens else "text",
        model_types=_routes(model_type),
        migration_limit=migration_limit,
        user_data=user_data or {},
        sends_kv_events=sends_kv_events,
        total_kv_blocks=total_kv_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        weights_digest=model.weights_digest,
    )
    try:
        record = msgspec.json.encode(card)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"user_data is not JSON: {error}", param="user_data") from error
    key = model_key(runtime.config.namespace, card.name, runtime.instance_id)
    await runtime.put(key, record)


def _check_kinds(model_input: object, model_type: object, endpoint: object) -> None:
    for name, value, kind in (
        ("model_input", model_input, ModelInput | None),
        ("model_type", model_type, ModelType),
        ("endpoint", endpoint, Endpoint),
    ):
        if not isinstance(value, kind):
            wanted = getattr(kind, "__name__", "ModelInput")
            raise ConfigError(f"{name} is {value!r}, not of {wanted}", param=name)
    if not model_type:
        raise ConfigError("model_type is empty: Chat, Completions or both", param="model_type")
    if model_input is ModelInput.Text and ModelType.Backend in ModelType(model_type):
        raise ConfigError(
            "model_type Backend reads tokens; with ModelInput.Text say Chat | Completions",
            param="model_type",
        )


def _check_at_least(name: str, value: object, least: int) -> None:
    if value is not None and (type(value) is not int or value < least):
        raise ConfigError(f"{name} is {value!r}, not an integer from {least} up", param=name)


def _routes(model_type: ModelType) -> list[str]:
    routes = {"chat": ModelType.Chat, "completions": ModelType.Completions}
    return [route for route, flag in routes.items() if flag in model_type]


def _context_length(model_input: ModelInput, length: int | None) -> int:
    if length is None and model_input is ModelInput.Tokens:
        raise ConfigError(
            f"context_length is needed: config.json has none of {', '.join(CONTEXT_KEYS)}",
            param="context_length",
        )
    return length or 0


def _hand_out(runtime: DistributedRuntime, files: ModelFiles) -> str:
    """Serves the files to frontends from now on; returns their digest."""
    holder = _holders.get(runtime)
    if holder is None:
        holder = _holders[runtime] = ModelFilesHolder()
        runtime.server.register(MODEL_FILES_ENDPOINT, holder.send)
    return holder.add(files)
