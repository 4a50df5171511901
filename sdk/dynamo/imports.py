"""Dynamo's names: their places in Tandem, and the differences.

`docs/from-dynamo.md` prints this table; `tandem.sdk.dynamo.port` rewrites import lines by it.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Names:
    """Names of one Dynamo module, and the Tandem module that exports them.

    `ours` None: Tandem does not have them, and `note` describes the alternative.
    """

    module: str
    names: tuple[str, ...]
    ours: str | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """The Tandem name: `name` of `module`; `name` None is the module itself."""

    module: str
    name: str | None


# A row is "theirs -> ours: names", with more names eight columns in, and then the note, four
# columns in. Without an arrow Tandem does not have the names.
_TABLE = """
# workers
dynamo.runtime -> tandem.sdk: DistributedRuntime Namespace Component Endpoint Client
    Instance ids are strings. `create_service()` does nothing. A runtime is made from a
    `RuntimeConfig`, or finds its cluster by itself.
dynamo.runtime -> tandem.sdk: dynamo_worker
    Also `worker`. `static=True` is an error: every worker is in the store.
dynamo.runtime -> tandem.sdk: Context
dynamo._core -> tandem.sdk: Client Component Context DistributedRuntime Endpoint
    `Context` can be made by hand: `Context(id, headers=...)`.
dynamo.runtime: dynamo_endpoint
    Annotate the handler's `request` with its Pydantic model; yield models or dicts.
dynamo.runtime.logging: configure_dynamo_logging
    Leave it out: `worker` and `run` set the standard library's logging up.
# models
dynamo.llm -> tandem.sdk: register_llm register_model ModelInput ModelType
    Both orders of arguments. `ModelType` has Chat, Completions (also Completion) and Backend. GGUF
    files are refused. `migration_limit` unset is the frontend's (3).
dynamo.llm: WorkerType
    Leave `worker_type=` and `needs=` out: `WorkerConfig.disaggregation_mode` is the role.
dynamo.llm: unregister_llm unregister_model fetch_model ModelRuntimeConfig
    A model leaves with its last instance; `register_llm` fetches it, and takes `total_kv_blocks`,
    `max_num_seqs` and `max_num_batched_tokens` itself.
# services
dynamo.sdk -> tandem.sdk: service endpoint dynamo_endpoint async_on_start on_shutdown depends
        dynamo_context liveness readiness
    Started by `tandem run module:Class`. `resources` are enforced. `dynamo_context` is also
    `tandem_context`.
dynamo.sdk.lib.config -> tandem.sdk: ServiceConfig
dynamo.sdk.lib.decorators -> tandem.sdk: async_on_start on_shutdown
dynamo.sdk: DYNAMO_IMAGE api abstract_endpoint
    Images are built outside; HTTP routes are the frontend's.
# KV routing
dynamo.llm -> tandem.sdk: KvMetricsPublisher KvMetricsAggregator AggregatedMetrics
    Over NATS events. `create_endpoint(component)` may be awaited.
dynamo.llm -> tandem.sdk: WorkerMetricsPublisher
dynamo.llm -> tandem.sdk: KvEventPublisher KvIndexer OverlapScores
    Worker ids are instance ids, strings. Lost events are noticed and requested again.
dynamo.llm: KvRouter KvRouterConfig RouterConfig RouterMode
    The frontend routes by prefix and load. For a custom router use `KvIndexer`,
    `KvMetricsAggregator` and `client.direct`.
# transfers
nixl._api -> tandem.sdk.nixl: nixl_agent nixl_agent_config
    Descriptors travel as packed integers, never pickled. "VRAM" with tensors of the host is an
    error. `NixlConnector` has all of it in one class.
# engines
dynamo.common.backend -> tandem.sdk.dynamo.worker_config: WorkerConfig
    `tandem.sdk.WorkerConfig` and Dynamo's further fields. Those that Tandem does not support
    (media_decoder, route_to_encoder, ...) are errors when they are set.
dynamo.common.backend -> tandem.sdk: EngineConfig GenerateChunk GenerateRequest LLMEngine
        LlmRegistration
dynamo.common.backend.engine -> tandem.sdk: EngineConfig GenerateChunk GenerateRequest LLMEngine
        LlmRegistration
dynamo.common.backend.worker -> tandem.sdk.dynamo.worker_config: WorkerConfig
dynamo.common.backend.run -> tandem.sdk.engine_worker.run: run
    `run(EngineClass, argv=None)`; the exit status is 1 after a failed start, 70 after a second
    signal.
dynamo.common.backend.disagg -> tandem.sdk: enforce_prefill_max_tokens extract_prefill_result
        require_prefill_result
    `require_prefill_result` raises PrefillResultMissing, a ValueError; another worker is tried.
dynamo.common.constants -> tandem.sdk: DisaggregationMode
    ENCODE is a name only.
dynamo.common.backend.publisher -> tandem.sdk: ComponentSnapshot KvEventSource PushSource ZmqSource
    `ZmqSource` needs the extra `zmq`.
dynamo.common.backend.dp_rank -> tandem.sdk.dynamo.dp_rank: forced_dp_rank validate_global_dp_rank
dynamo.common.backend.telemetry -> tandem.sdk.worker.telemetry: current_span start_span
        engine_trace_kwargs trace_headers
    Does nothing where opentelemetry-api is not installed.
dynamo.common.backend.health_check -> tandem.sdk.engine.health_check: HEALTH_CHECK_KEY
        bos_token_id_or build_health_check_payload is_probe parse_health_check_payload_cli
dynamo.health_check -> tandem.sdk.engine.health_check: HEALTH_CHECK_KEY
dynamo.common.backend.metrics -> tandem.sdk.engine.metrics: register_engine_registry
        register_global_registry
dynamo._core.backend -> tandem.sdk.engine.metrics: EngineMetrics
dynamo.common.backend.logprobs -> tandem.sdk.dynamo.request_options: parse_logprob_options
dynamo.common.backend.logprobs: extract_from_completion_output extract_from_sglang_meta
    Fill `log_probs` and `top_logprobs` from your engine's output.
dynamo.common.backend.sample_engine: SampleLLMEngine
    Use `tandem.sdk.sample_engine.SampleEngine`; its tokens count up from the prompt's last token.
dynamo.common.backend.multimodal: encoder_terminal_chunk extract_multimodal_kwargs
        require_encoder_result
    Images are the `images` of a request.
dynamo.common.backend: BaseEngine DiffusionEngine RawEngine RawRequest RawResponseChunk Worker
    Engines answer with tokens or text; `run` serves them.
dynamo.common.utils.token_ids -> tandem.sdk.dynamo.request_options: normalize_request_token_ids
        token_ids_len token_ids_to_list
    Not needed: Tandem's requests hold lists.
dynamo.common.utils.structural_tag -> tandem.sdk.dynamo.request_options: serialize_structural_tag
    Requests carry no tag: the frontend makes the grammar, in `sampling_options["grammar"]`.
dynamo.common.backend.engine: ForcedTokenSequenceSpec LogitsProcessorSpec PythonProcessorSpec
        is_generation_stage logits_processors_for_request serialize_logits_processor_entries
        deserialize_logits_processor_entries BaseEngine DiffusionEngine RawEngine
    Logits processors are the engine's own; engines answer with tokens or text.
dynamo.common.backend.metrics: gather_with_labels ensure_prometheus_multiproc_dir
    `register_engine_registry` takes a registry as it is and adds the labels.
dynamo.llm.exceptions -> tandem.sdk.exceptions: CannotConnect Cancelled ConnectionTimeout
        Disconnected DynamoException EngineShutdown InvalidArgument RouterQueueLimitExceeded
        StreamIncomplete Unknown WorkerUnavailable
    Most are other names of Tandem's own errors; `DynamoException` is TandemError.
dynamo.llm.exceptions: HttpError
    Raise the specific error instead: InvalidArgument is 400, WorkerUnavailable 503.
"""


def _rows() -> Iterator[Names]:
    heads: list[str] = []
    notes: list[str] = []
    for line in _TABLE.splitlines():
        if line and not line.startswith((" ", "#")):
            heads.append(line)
            notes.append("")
        elif line.startswith(8 * " "):
            heads[-1] += f" {line.strip()}"
        elif line.startswith(" "):
            notes[-1] = f"{notes[-1]} {line.strip()}".strip()
    for head, note in zip(heads, notes, strict=True):
        modules, _, names = head.partition(": ")
        theirs, _, ours = modules.partition(" -> ")
        yield Names(theirs, tuple(names.split()), ours or None, note)


TABLE = tuple(_rows())

# Modules that are imported as such: `from dynamo.common.backend import telemetry`
MODULES = {
    "dynamo.common.backend.telemetry": "tandem.sdk.worker.telemetry",
    "dynamo.common.backend.dp_rank": "tandem.sdk.dynamo.dp_rank",
    "dynamo.common.backend.health_check": "tandem.sdk.engine.health_check",
    "dynamo.llm.exceptions": "tandem.sdk.exceptions",
}


def find(module: str, name: str) -> Place | Names | None:
    """Return the Place of a name, or the row with its alternative, or None if unknown."""
    if (whole := MODULES.get(f"{module}.{name}")) is not None:
        return Place(whole, None)
    for row in TABLE:
        if row.module == module and name in row.names:
            return row if row.ours is None else Place(row.ours, name)
    return None


def markdown() -> str:
    """Return the table as `docs/from-dynamo.md` prints it."""
    lines = ["| from | import | in Tandem | what differs |", "| --- | --- | --- | --- |"]
    for row in TABLE:
        names = ", ".join(f"`{name}`" for name in row.names)
        ours = "not here" if row.ours is None else f"`{row.ours}`"
        lines.append(f"| `{row.module}` | {names} | {ours} | {row.note} |".replace("|  |", "| |"))
    for theirs, ours in MODULES.items():
        package, _, name = theirs.rpartition(".")
        lines.append(f"| `{package}` | `{name}`, the module | `{ours}` | |")
    return "\n".join(lines)
