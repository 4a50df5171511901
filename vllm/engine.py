"""`tandem engine vllm MODEL`: vLLM's engine behind Tandem's frontend.

Loaded only where vLLM is installed.
"""

import asyncio
import functools
import logging
import multiprocessing
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any, Self

from tandem.runtime.address import new_id
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import InternalError, InvalidRequestError
from tandem.runtime.local.temporary_folder import TemporaryFolder
from tandem.runtime.plane.server import RequestServer, Responder
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.handoff_messages import Ack
from tandem.runtime.wire.messages import encode, unpack_tokens
from tandem.sdk.engine.health_check import build_health_check_payload
from tandem.sdk.engine.llm_engine import LLMEngine
from tandem.sdk.engine.metrics import EngineMetrics, SnapshotPublisher, register_global_registry
from tandem.sdk.engine.types import EngineConfig, GenerateChunk, GenerateRequest, VectorRequest
from tandem.sdk.engine.worker_config import WorkerConfig
from tandem.sdk.exceptions import EngineShutdown, InvalidArgument, StreamIncomplete
from tandem.sdk.kv.sources import KvEventSource, ZmqSource
from tandem.sdk.worker import telemetry
from tandem.sdk.worker.context import Context
from tandem.sdk.worker.distributed_runtime import Endpoint
from tandem.vllm.controls import CONTROLS, Controls
from tandem.vllm.requests.pooling import (
    endpoint_types,
    num_labels,
    pooled,
    probe,
    sees_images,
    type_fields,
)
from tandem.vllm.requests.sampling import (
    bad_words,
    cancelled,
    chunk_of,
    grammar_fields,
    sampling_fields,
)
from tandem.vllm.scheduler_side import PLACE, REPORT, TICKET
from tandem.vllm.settings import PROMPTS, connector_config
from tandem.vllm.step_messages import COMPUTE, ComputePrompt
from tandem.vllm.versions import check_version

VLLM_VERSION = check_version()
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # as Tandem's own log

from vllm import AsyncEngineArgs, PoolingParams, SamplingParams, TokensPrompt  # noqa: E402
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.multimodal.media import ImageMediaIO  # noqa: E402
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402

from tandem.vllm.arguments import CONNECTOR, parse_arguments  # noqa: E402
from tandem.vllm.load import LoadLogger  # noqa: E402
from tandem.vllm.requests.errors import translated  # noqa: E402

SHUTDOWN_S = 1.0  # for vLLM's processes to end by themselves; no request runs any more
_GIVE_UP_POLL_S = 0.1  # a start has a moment before it has processes
_GIVEN_UP = ("abort", "error")  # finish reasons of vLLM's, when the caller has not left
_decode_prompt = decoder(ComputePrompt, InvalidRequestError)


class VllmEngine(LLMEngine):
    """One vLLM engine, of one data-parallel rank. Its model runs in a process of vLLM's own."""

    def __init__(self, arguments: AsyncEngineArgs, adapters: Mapping[str, LoRARequest]) -> None:
        self._arguments = arguments
        self._adapters = adapters
        self._starting: asyncio.Task[AsyncLLM] | None = None
        self._llm: AsyncLLM | None = None
        self._stack = AsyncExitStack()  # closed after vLLM's end
        self._load = LoadLogger()
        self._types: list[str] = []  # of endpoints, that the loaded model serves
        self._controls = Controls()

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        """Return the engine of a command line, and the worker's configuration."""
        arguments, adapters, config = parse_arguments(sys.argv[1:] if argv is None else argv)
        return cls(arguments, adapters), config

    # ---- lifecycle ----------------------------------------------------------------------------

    async def start(self, worker_id: int) -> EngineConfig:
        await self._serve_prompts()
        if self._arguments.kv_events_config is None:
            folder = TemporaryFolder("vllm")
            self._stack.callback(folder.remove)
            endpoint = f"ipc://{folder.path}/kv-events"
            self._arguments.kv_events_config = KVEventsConfig(True, "zmq", endpoint)
        logging.setLogRecordFactory(logging.LogRecord)  # vLLM's lines show more than Tandem's
        # a start that is cancelled goes on in its thread, and `cleanup` ends it
        self._starting = asyncio.create_task(asyncio.to_thread(self._build))
        self._llm = llm = await asyncio.shield(self._starting)
        config: VllmConfig = llm.vllm_config
        cache, scheduler = config.cache_config, config.scheduler_config
        names = self._arguments.served_model_name
        self._types = endpoint_types(
            await llm.get_supported_tasks(), num_labels(config.model_config.hf_config)
        )
        return EngineConfig(
            model=self._arguments.model,
            served_model_name=names[0],
            model_aliases=[*names[1:], *self._adapters],
            context_length=config.model_config.max_model_len,
            kv_cache_block_size=cache.block_size,
            total_kv_blocks=cache.num_gpu_blocks,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            runtime_data={"engine": f"vllm {VLLM_VERSION}"},
            supports_grammar=True,
            supports_token_rules=True,
            supports_images=sees_images(llm.renderer.mm_processor),
            endpoint_types=",".join(self._types),
        )

    async def _serve_prompts(self) -> None:
        """Compute prompts for the connector, if it takes tickets of other workers."""
        connector = self._connector
        if connector is None or not connector.is_kv_producer:
            return
        extra = connector.kv_connector_extra_config
        server = RequestServer(connector_config(extra).runtime, new_id())
        server.register(COMPUTE, self._compute_prompt)
        await server.start()
        self._stack.push_async_callback(server.stop)
        extra[PROMPTS] = server.address

    async def _compute_prompt(
        self, payload: bytes, context: RequestContext, answer: Responder
    ) -> None:
        """Answer once the prompt is computed; a rank that leaves ends it."""
        prompt = _decode_prompt(payload)
        computing = asyncio.create_task(self._compute(prompt))

        def leave() -> None:
            computing.cancel()

        context.on_cancel(leave)
        try:
            await computing
        except Exception as error:  # of the engine's, of any kind
            raise InternalError(f"{error!r}"[:500]) from error
        answer.send(encode(Ack()))

    async def _compute(self, prompt: ComputePrompt) -> None:
        if self._starting is None:
            raise EngineShutdown("vLLM's engine has ended")
        llm = await asyncio.shield(self._starting)  # the connector takes tickets before its end
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": {TICKET: prompt.key}},
        )
        tokens = _tokens(unpack_tokens(prompt.token_ids), prompt.cache_salt)
        async with aclosing(llm.generate(tokens, sampling, prompt.key)) as outputs:
            async for _ in outputs:
                pass

    def _build(self) -> AsyncLLM:
        return AsyncLLM.from_engine_args(
            self._arguments, stat_loggers=[lambda config, index: self._load]
        )

    async def cleanup(self) -> None:
        starting, self._starting, self._llm = self._starting, None, None
        if starting is not None:
            await _give_up(starting)
            with suppress(Exception):  # of a start that failed, or was given up
                await asyncio.to_thread((await starting).shutdown, SHUTDOWN_S)
        await self._stack.aclose()

    # ---- requests -----------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[GenerateChunk, None]:
        prompt, num_tokens = request["token_ids"], 0
        tokens = _tokens(prompt, (request.get("extra_args") or {}).get("cache_salt"))
        if images := request.get("images"):
            reading = asyncio.to_thread(lambda: list(map(_read, images, range(len(images)))))
            tokens["multi_modal_data"] = {"image": await reading}
        llm = self._running()
        trace = telemetry.engine_trace_kwargs(context)
        name, reports = context.id(), self._load.reports
        adapter, transfer = (
            self._adapter(request.get("model")),
            self._transfer_params(request, name),
        )
        try:
            sampling = _sampling(request, transfer)
            outputs = llm.generate(tokens, sampling, name, lora_request=adapter, **trace)
            async with aclosing(outputs):
                async for output in outputs:
                    completion = output.outputs[0]
                    if context.is_stopped():
                        yield cancelled(len(prompt), num_tokens)
                        return
                    if completion.finish_reason in _GIVEN_UP:
                        raise StreamIncomplete("vLLM has given up the request")
                    chunk = chunk_of(completion, len(prompt), num_tokens)
                    if images and not num_tokens:
                        chunk["num_prompt_tokens"] = len(output.prompt_token_ids)
                    num_tokens += len(chunk["token_ids"])
                    if (report := reports.pop(name, None)) is not None:
                        chunk["prefill"] = report
                    yield chunk
        except Exception as error:
            raise translated(error, request) from error
        finally:
            reports.pop(name, None)

    async def embed(self, request: VectorRequest, context: Context) -> list[list[float]]:
        params = PoolingParams(task="embed", dimensions=request.get("dimensions"))
        return await self._pooled(request, [params] * len(request["token_ids"]), context)

    async def score(self, request: VectorRequest, context: Context) -> list[float]:
        config = self._running().vllm_config.model_config.hf_config
        params = [
            PoolingParams(task="classify", extra_kwargs=each)
            for each in type_fields(config, request["second_starts"])
        ]
        return [vector[0] for vector in await self._pooled(request, params, context)]

    async def _pooled(
        self, request: VectorRequest, params: list[PoolingParams], context: Context
    ) -> list[list[float]]:
        """Return vLLM's vector of each input."""
        how: dict[str, Any] = telemetry.engine_trace_kwargs(context)
        how["lora_request"] = self._adapter(request.get("model"))
        encode_one = functools.partial(self._running().encode, **how)
        prompts = [_tokens(each, None) for each in request["token_ids"]]
        try:
            return await pooled(encode_one, prompts, params, context.id())
        except ExceptionGroup as errors:
            raise translated(errors.exceptions[0], request) from errors

    def _adapter(self, name: str | None) -> LoRARequest | None:
        """Return the adapter of a request's model; None for the model itself.

        Raise InvalidArgument for an adapter that only other workers have.
        """
        if name is None or name in self._arguments.served_model_name:
            return None
        if name not in self._adapters:
            raise InvalidArgument(f"this worker has no adapter {name!r}", param="model")
        return self._adapters[name]

    def _transfer_params(self, request: GenerateRequest, name: str) -> dict[str, str] | None:
        """Return the request's part for the connector, which reports its prompt's place."""
        if self._connector is None:
            return None
        self._load.reports[name] = None
        place = (request.get("extra_args") or {}).get("prefill_place")
        return {REPORT: name} | ({PLACE: place} if place else {})

    @property
    def _connector(self) -> KVTransferConfig | None:
        """The configuration of vLLM's connector, if it is Tandem's."""
        given = self._arguments.kv_transfer_config
        is_ours = given is not None and given.kv_connector_module_path == CONNECTOR
        return given if is_ours else None

    async def abort(self, context: Context) -> None:
        if self._llm is not None:
            await self._llm.abort(context.id())

    def _running(self) -> AsyncLLM:
        if self._llm is None or self._llm.errored:
            raise EngineShutdown("vLLM's engine has ended")
        self._controls.check_awake()
        return self._llm

    # ---- commands -----------------------------------------------------------------------------

    async def on_endpoint_ready(self, endpoint: Endpoint) -> None:
        self._controls.endpoint = endpoint

    def supported_controls(self) -> set[str]:
        return CONTROLS

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._llm is None:
            raise EngineShutdown("vLLM's engine has ended")
        return await self._controls.run(self._llm, control, body)

    # ---- the cache, load, metrics, health -----------------------------------------------------

    async def kv_event_sources(self) -> Sequence[KvEventSource]:
        events: KVEventsConfig | None = self._arguments.kv_events_config
        caches = self._running().vllm_config.cache_config.enable_prefix_caching
        if not caches or events is None or events.publisher != "zmq":
            return []
        return [ZmqSource(events.endpoint.replace("*", "127.0.0.1"), events.topic)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: SnapshotPublisher) -> None:
        num_blocks = self._running().vllm_config.cache_config.num_gpu_blocks
        self._load.publish_to(publisher, num_blocks or 0)

    async def register_prometheus(self, metrics: EngineMetrics) -> None:
        register_global_registry(metrics, engine_prefix="vllm:")

    async def health_check_payload(self) -> dict[str, Any] | None:
        extras = {} if "chat" in self._types else probe(self._types)
        return build_health_check_payload(0, extras=extras)


async def _give_up(starting: asyncio.Task[AsyncLLM]) -> None:
    """Wait for the end of a start; end the processes without which one that still runs fails."""
    while not starting.done():
        for process in multiprocessing.active_children():
            process.terminate()
        await asyncio.wait({starting}, timeout=_GIVE_UP_POLL_S)


def _tokens(token_ids: list[int], cache_salt: str | None) -> TokensPrompt:
    tokens = TokensPrompt(prompt_token_ids=token_ids)
    if cache_salt:
        tokens["cache_salt"] = cache_salt
    return tokens


def _read(image: bytes, index: int) -> Any:
    """Return vLLM's form of an image. Raise InvalidArgument for one that cannot be read."""
    try:
        return ImageMediaIO().load_bytes(image)
    except ValueError as error:
        raise InvalidArgument(f"vLLM: {error}", param=f"images[{index}]") from error


def _sampling(request: GenerateRequest, transfer: dict[str, str] | None) -> SamplingParams:
    grammar = grammar_fields(request)
    structured = None if grammar is None else StructuredOutputsParams(**grammar)
    params = SamplingParams(
        **sampling_fields(request),
        extra_args={"kv_transfer_params": transfer} if transfer else None,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=structured,
    )
    # vLLM takes words as texts and tokenizes them into this; the frontend has done so
    params._bad_words_token_ids = bad_words(request)
    return params
