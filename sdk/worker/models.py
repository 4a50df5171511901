"""Registration of models: frontends send their requests to the endpoint."""

import asyncio
import enum
import time
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import msgspec

from tandem.runtime.errors import ConfigError, ProtocolError
from tandem.runtime.store.discovery import decode_card, model_key
from tandem.runtime.wire.cluster_messages import AnswerRules, ModelCard
from tandem.sdk.worker.distributed_runtime import Endpoint
from tandem.sdk.worker.model_folders import (
    CONTEXT_KEYS,
    ReadModel,
    read_text_model,
    read_token_model,
)

DEFAULT_BLOCK_SIZE = 16  # tokens


class ModelInput(enum.Enum):
    """The input of a worker: token ids, or the client's text."""

    Tokens = "tokens"
    Text = "text"


class ModelType(enum.Flag):
    """The routes of a model; `|` joins them.

    `Backend` is chat and completions. In the older form of `register_llm` it is the only type that
    means token ids.
    """

    Chat = 1
    Completions = 2
    Completion = 2
    Backend = 7
    Embedding = 8
    Embeddings = 8
    Rerank = 16


_VECTORS = ModelType.Embeddings | ModelType.Rerank


@dataclass(frozen=True)
class ModelRegistration:
    """A model under a name. It is served as long as an instance of `endpoint` is.

    A text model needs no files, and `model_path` may be any name. The frontend serves a model
    without `migration_limit` with its own limit.
    """

    model_input: ModelInput | None  # None: ModelType.Backend reads tokens, others text
    model_type: ModelType
    endpoint: Endpoint
    model_path: str | Path  # a hub id (also hf://...), a folder, or the bundled model
    model_name: str | None = None  # for clients; by default the hub id or the folder's name
    context_length: int | None = None  # tokens; by default the model's
    kv_cache_block_size: int | None = None  # tokens; by default 16
    _: KW_ONLY
    migration_limit: int | None = None  # how often another worker may resume an answer
    user_data: dict[str, Any] | None = None  # any JSON, for readers of the model card
    custom_template_path: str | Path | None = None  # a Jinja file instead of the chat template
    sends_kv_events: bool = False
    supports_grammar: bool = False  # its handler reads `sampling_options["grammar"]`
    supports_token_rules: bool = False  # and `allowed_token_ids` and `bad_words`
    supports_images: bool = False  # and the request's `images`
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    answers: AnswerRules | None = None

    async def publish(self) -> None:
        """Put the model's card into discovery. Raise as `register_llm` does."""
        self._check()
        implied = ModelInput.Tokens if ModelType.Backend in self.model_type else ModelInput.Text
        model_input = self.model_input or implied
        read = read_token_model if model_input is ModelInput.Tokens else read_text_model
        model = await asyncio.to_thread(read, self.model_path, self.custom_template_path)
        card = self._card(model_input, model)
        try:
            record = msgspec.json.encode(card)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"user_data is not JSON: {error}", param="user_data") from error
        try:
            decode_card(record)
        except ProtocolError as error:
            reason = f"no frontend takes this model: {error}"
            raise ConfigError(reason, param=error.param) from error
        runtime = self.endpoint.runtime
        key = model_key(runtime.config.namespace, card.name, runtime.instance_id)
        await runtime.put(key, record)

    def _check(self) -> None:
        _check_kinds(self.model_input, self.model_type, self.endpoint)
        name = self.model_name
        if name is not None and not (isinstance(name, str) and name):
            raise ConfigError(f"model_name is {name!r}, not a name", param="model_name")
        _check_at_least("context_length", self.context_length, 1)
        _check_at_least("kv_cache_block_size", self.kv_cache_block_size, 1)
        _check_at_least("migration_limit", self.migration_limit, 0)

    def _card(self, model_input: ModelInput, model: ReadModel) -> ModelCard:
        runtime = self.endpoint.runtime
        name = self.model_name or model.name
        try:
            name.encode()
        except UnicodeEncodeError as error:  # a folder's bytes, in a locale of another encoding
            raise ConfigError(
                f"model_name is {name!r}, not text; Python reads names as UTF-8 with PYTHONUTF8=1",
                param="model_name",
            ) from error
        length = self.context_length or model.context_length
        return ModelCard(
            name=name,
            context_length=_context_length(model_input, length),
            block_size=self.kv_cache_block_size or DEFAULT_BLOCK_SIZE,
            vocab_size=model.vocab_size,
            files_digest="" if model.files is None else runtime.model_files.add(model.files),
            instance_id=runtime.instance_id,
            created_s=int(time.time()),
            endpoint=str(self.endpoint.address),
            model_input="tokens" if model_input is ModelInput.Tokens else "text",
            model_types=_routes(self.model_type),
            migration_limit=self.migration_limit,
            user_data=self.user_data or {},
            sends_kv_events=self.sends_kv_events,
            supports_grammar=self.supports_grammar,
            supports_token_rules=self.supports_token_rules,
            supports_images=self.supports_images,
            total_kv_blocks=self.total_kv_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            weights_digest=model.weights_digest,
            answers=self.answers or AnswerRules(),
        )


async def register_llm(*args: Any, **kwargs: Any) -> None:
    """Register a model; the arguments are the fields of `ModelRegistration`, in their order.

    In the older form `model_input` is left out, and `model_type` implies it.

    Raise ConfigError naming a wrong argument, ModelError naming a missing part of a model folder.
    """
    if "model_input" not in kwargs and not (args and isinstance(args[0], ModelInput)):
        args = (None, *args)
    await ModelRegistration(*args, **kwargs).publish()


register_model = register_llm


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
            "model_type Backend reads tokens; with ModelInput.Text use Chat | Completions",
            param="model_type",
        )
    if model_input is ModelInput.Text and ModelType(model_type) & _VECTORS:
        raise ConfigError(
            "model_type: embeddings and rerank are for ModelInput.Tokens", param="model_type"
        )


def _check_at_least(name: str, value: object, least: int) -> None:
    if value is not None and (type(value) is not int or value < least):
        raise ConfigError(f"{name} is {value!r}, not an integer from {least} up", param=name)


def _routes(model_type: ModelType) -> list[str]:
    routes = {
        "chat": ModelType.Chat,
        "completions": ModelType.Completions,
        "embeddings": ModelType.Embeddings,
        "rerank": ModelType.Rerank,
    }
    return [route for route, flag in routes.items() if flag in model_type]


def _context_length(model_input: ModelInput, length: int | None) -> int:
    if length is None and model_input is ModelInput.Tokens:
        raise ConfigError(
            f"context_length is needed: config.json has none of {', '.join(CONTEXT_KEYS)}",
            param="context_length",
        )
    return length or 0
