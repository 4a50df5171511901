"""The part of vLLM that the engine calls, without a model: it counts up from the last token."""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

BLOCK_SIZE = 128
NUM_BLOCKS = 64
MAX_MODEL_LEN = 20_000


class VLLMClientError(Exception):
    """The caller's error; `parameter` is the field at fault."""

    parameter: str | None = None


class GracefulHTTPError(Exception):
    """vLLM takes no more requests."""


class EngineDeadError(Exception):
    """The engine's process has ended."""


class EngineGenerateError(Exception):
    """One request has failed."""


@dataclass
class KVEventsConfig:
    enable_kv_cache_events: bool = False
    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    topic: str = ""


@dataclass
class KVTransferConfig:
    kv_connector: str
    kv_connector_module_path: str
    kv_role: str
    kv_load_failure_policy: str = "fail"
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)

    @property
    def is_kv_producer(self) -> bool:
        return self.kv_role in ("kv_producer", "kv_both")


@dataclass
class StructuredOutputsParams:
    json: str | None = None
    regex: str | None = None
    grammar: str | None = None
    structural_tag: str | None = None


@dataclass
class SamplingParams:
    output_kind: str
    max_tokens: int
    detokenize: bool
    structured_outputs: StructuredOutputsParams | None = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    seed: int | None = None
    min_tokens: int = 0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    _bad_words_token_ids: list[list[int]] | None = None
    extra_args: dict[str, Any] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be non-negative, got {self.temperature}.")


@dataclass
class PoolingParams:
    task: str
    dimensions: int | None = None
    extra_kwargs: dict[str, Any] | None = None


class Tensor(list[float]):
    """A vector, as far as it is read."""

    def reshape(self, _size: int) -> "Tensor":
        return self

    def tolist(self) -> list[float]:
        return list(self)


@dataclass
class AsyncEngineArgs:
    model: str
    served_model_name: str | list[str] | None = None
    data_parallel_size: int = 1
    kv_events_config: KVEventsConfig | None = None
    kv_transfer_config: KVTransferConfig | None = None
    enable_lora: bool | None = None
    structured_outputs_config: Any = field(default_factory=lambda: SimpleNamespace(backend="auto"))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--model")
        parser.add_argument("--served-model-name", nargs="+")
        parser.add_argument("--data-parallel-size", type=int, default=1)
        parser.add_argument("--kv-transfer-config")
        return parser

    @classmethod
    def from_cli_args(cls, parsed: argparse.Namespace) -> "AsyncEngineArgs":
        given = parsed.kv_transfer_config
        transfer = None if given is None else KVTransferConfig(**json.loads(given))
        return cls(
            parsed.model,
            parsed.served_model_name,
            parsed.data_parallel_size,
            kv_transfer_config=transfer,
        )


class LoRARequest(NamedTuple):
    lora_name: str
    lora_int_id: int
    lora_path: str


class AsyncLLM:
    """An engine of one process. A test sets `failure` for the next request."""

    made: ClassVar["list[AsyncLLM]"] = []
    hold_start: ClassVar[Callable[[], None] | None] = (
        None  # runs in the thread that starts the engine
    )

    tasks: ClassVar[tuple[str, ...]] = ("generate",)
    hf_config: ClassVar[Any] = SimpleNamespace()
    mm_limits: ClassVar[dict[str, int] | None] = None  # of a model of text alone

    def __init__(self, arguments: AsyncEngineArgs, loggers: list[Any]) -> None:
        self.arguments = arguments
        self.pooled: list[tuple[list[int], PoolingParams, str]] = []
        self.loggers = loggers
        self.running: dict[str, bool] = {}  # request id |-> is aborted
        self.params: list[SamplingParams] = []
        self.prompts: list[dict[str, Any]] = []
        self.adapters: list[LoRARequest | None] = []
        self.failure: Exception | str | None = None  # or the finish reason of a given-up request
        self.errored = False
        self.has_ended = False
        self.commands: list[tuple[Any, ...]] = []
        self.vllm_config = SimpleNamespace(
            kv_transfer_config=arguments.kv_transfer_config,
            cache_config=SimpleNamespace(
                block_size=BLOCK_SIZE, num_gpu_blocks=NUM_BLOCKS, enable_prefix_caching=True
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=512),
            model_config=SimpleNamespace(
                max_model_len=MAX_MODEL_LEN, hf_config=self.hf_config, enable_sleep_mode=False
            ),
        )
        limits = SimpleNamespace(allowed_mm_limits=self.mm_limits)
        processor = None if self.mm_limits is None else SimpleNamespace(info=limits)
        self.renderer = SimpleNamespace(mm_processor=processor)
        self.made.append(self)

    @classmethod
    def from_engine_args(
        cls, arguments: AsyncEngineArgs, stat_loggers: list[Callable[[Any, int], Any]]
    ) -> "AsyncLLM":
        if cls.hold_start is not None:
            cls.hold_start()
        return cls(arguments, [make(None, 0) for make in stat_loggers])

    async def generate(
        self,
        prompt: dict[str, Any],
        params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: dict[str, str] | None = None,
    ) -> AsyncIterator[Any]:
        if isinstance(failure := self.failure, Exception):
            self.failure, self.errored = None, isinstance(failure, EngineDeadError)
            raise failure
        if not prompt["prompt_token_ids"]:
            raise VLLMClientError("the prompt is empty")
        self.prompts.append(prompt)
        self.adapters.append(lora_request)
        self.params.append(params)
        self._record((params.extra_args or {}).get("kv_transfer_params", {}))
        self.running[request_id] = False
        try:
            token_id = prompt["prompt_token_ids"][-1]
            for number in range(1, params.max_tokens + 1):
                await asyncio.sleep(0.001)
                token_id += 1
                reason = "length" if number == params.max_tokens else None
                if token_id in (params.stop_token_ids or ()):
                    reason = "stop"
                if self.running[request_id]:
                    reason = "abort"
                reason = self.failure or reason
                num_images = len(prompt.get("multi_modal_data", {}).get("image", []))
                yield SimpleNamespace(
                    outputs=[self._completion(token_id, params, reason)],
                    prompt_token_ids=prompt["prompt_token_ids"] + [0] * 9 * num_images,
                )
                if reason is not None:
                    return
        finally:
            del self.running[request_id]

    def _record(self, transfer: dict[str, str]) -> None:
        """Log a step's statistics, with the reports of a connector."""
        placements = {"another's": {"place": "local", "reason": "policy"}}
        if (name := transfer.get("tandem_report")) is not None:
            place = transfer.get("tandem_prefill", "local")
            placements[name] = {"place": place, "reason": "asked", "cause": "asked"}
        stats = SimpleNamespace(
            prefix_cache_stats=SimpleNamespace(queries=0, hits=0),
            kv_cache_usage=0.0,
            kv_connector_stats=placements if transfer else None,
        )
        for logger in self.loggers:
            logger.record(stats, None)

    def _completion(self, token_id: int, params: SamplingParams, reason: Any) -> Any:
        rows = None
        if params.logprobs is not None:
            ids = range(token_id, token_id + max(1, params.logprobs))
            rows = [{each: SimpleNamespace(logprob=0.1 * (token_id - each)) for each in ids}]
        return SimpleNamespace(token_ids=[token_id], logprobs=rows, finish_reason=reason)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return self.tasks

    async def encode(
        self,
        prompt: dict[str, Any],
        params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: dict[str, str] | None = None,
    ) -> AsyncIterator[Any]:
        self.pooled.append((prompt["prompt_token_ids"], params, request_id))
        await asyncio.sleep(0.001)
        if isinstance(self.failure, Exception):
            raise self.failure
        vector = [0.5] if params.task == "classify" else [1.0] * (params.dimensions or 3)
        yield SimpleNamespace(outputs=SimpleNamespace(data=Tensor(vector)))

    async def abort(self, request_id: str) -> None:
        if request_id in self.running:
            self.running[request_id] = True

    async def sleep(self, level: int, mode: str) -> None:
        self.commands.append(("sleep", level, mode))
        self.running = dict.fromkeys(self.running, mode == "abort")
        while self.running:
            await asyncio.sleep(0.001)

    async def wake_up(self, tags: list[str] | None) -> bool:
        self.commands.append(("wake_up", tags))
        return tags != ["weights"]

    async def reset_prefix_cache(self) -> bool:
        self.commands.append(("reset_prefix_cache",))
        return True

    def shutdown(self, timeout: float) -> None:
        self.has_ended = True


class ImageMediaIO:
    """Reads images; those of one color are written as its name."""

    def load_bytes(self, data: bytes) -> str:
        if not data.startswith(b"PNG"):
            raise ValueError("Failed to load image")
        return data.removeprefix(b"PNG ").decode()


class StatLoggerBase:
    """The base of loggers of statistics."""


class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorBase:
    """The base of connectors, as far as it keeps something for them."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._kv_cache_config = kv_cache_config


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


# Module |-> the names that the room imports from it.
MODULES: dict[str, dict[str, Any]] = {
    "vllm": {
        "AsyncEngineArgs": AsyncEngineArgs,
        "PoolingParams": PoolingParams,
        "SamplingParams": SamplingParams,
        "TokensPrompt": dict,
    },
    "vllm.config": {
        "KVEventsConfig": KVEventsConfig,
        "KVTransferConfig": KVTransferConfig,
        "VllmConfig": SimpleNamespace,
    },
    "vllm.exceptions": {"GracefulHTTPError": GracefulHTTPError, "VLLMClientError": VLLMClientError},
    "vllm.lora": {},
    "vllm.lora.request": {"LoRARequest": LoRARequest},
    "vllm.multimodal": {},
    "vllm.multimodal.media": {"ImageMediaIO": ImageMediaIO},
    "vllm.sampling_params": {
        "RequestOutputKind": SimpleNamespace(DELTA="delta", FINAL_ONLY="final"),
        "StructuredOutputsParams": StructuredOutputsParams,
    },
    "vllm.utils": {},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": argparse.ArgumentParser},
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": KVConnectorBase,
        "KVConnectorRole": KVConnectorRole,
        "KVConnectorTransferResults": KVConnectorTransferResults,
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {"KVConnectorStats": KVConnectorStats},
    "vllm.v1": {},
    "vllm.v1.engine": {},
    "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
    "vllm.v1.engine.exceptions": {
        "EngineDeadError": EngineDeadError,
        "EngineGenerateError": EngineGenerateError,
    },
    "vllm.v1.metrics": {},
    "vllm.v1.metrics.loggers": {"StatLoggerBase": StatLoggerBase},
}
LOADS_VLLM = tuple(
    f"tandem.vllm.{name}"
    for name in ("arguments", "connector", "engine", "load", "requests.errors")
)


@contextmanager
def installed() -> Iterator[None]:
    """Put the modules in vLLM's place; the room's own that import vLLM are loaded anew."""
    names = (*MODULES, *LOADS_VLLM)
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    for name, values in MODULES.items():
        module = ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
