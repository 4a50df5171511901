"""Dynamo's names: their places in Tandem, and the differences.

`docs/from-dynamo.md` prints this table; `tandem.sdk.dynamo.port` rewrites import lines by it.
"""

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


def _names(module: str, names: str, ours: str | None, note: str = "") -> Names:
    return Names(module, tuple(names.split()), ours, note)


_SDK = "tandem.sdk"
_BACKEND = "dynamo.common.backend"

TABLE: tuple[Names, ...] = (
    # workers
    _names(
        "dynamo.runtime",
        "DistributedRuntime Namespace Component Endpoint Client",
        _SDK,
        "Instance ids are strings. `create_service()` does nothing. A runtime is made from a "
        "`RuntimeConfig`, or finds its cluster by itself.",
    ),
    _names(
        "dynamo.runtime",
        "dynamo_worker",
        _SDK,
        "Also `worker`. `static=True` is an error: every worker is in the store.",
    ),
    _names("dynamo.runtime", "Context", _SDK),
    _names(
        "dynamo._core",
        "Client Component Context DistributedRuntime Endpoint",
        _SDK,
        "`Context` can be made by hand: `Context(id, headers=...)`.",
    ),
    _names(
        "dynamo.runtime",
        "dynamo_endpoint",
        None,
        "Annotate the handler's `request` with its Pydantic model; yield models or dicts.",
    ),
    _names(
        "dynamo.runtime.logging",
        "configure_dynamo_logging",
        None,
        "Leave it out: `worker` and `run` set the standard library's logging up.",
    ),
    # models
    _names(
        "dynamo.llm",
        "register_llm register_model ModelInput ModelType",
        _SDK,
        "Both orders of arguments. `ModelType` has Chat, Completions (also Completion) and "
        "Backend. GGUF files are refused. `migration_limit` unset is the frontend's (3).",
    ),
    _names(
        "dynamo.llm",
        "WorkerType",
        None,
        "Leave `worker_type=` and `needs=` out: `WorkerConfig.disaggregation_mode` is the role.",
    ),
    _names(
        "dynamo.llm",
        "unregister_llm unregister_model fetch_model ModelRuntimeConfig",
        None,
        "A model leaves with its last instance; `register_llm` fetches it, and takes "
        "`total_kv_blocks`, `max_num_seqs` and `max_num_batched_tokens` itself.",
    ),
    # services
    _names(
        "dynamo.sdk",
        "service endpoint dynamo_endpoint async_on_start on_shutdown depends dynamo_context "
        "liveness readiness",
        _SDK,
        "Started by `tandem run module:Class`. `resources` are enforced. `dynamo_context` is also "
        "`tandem_context`.",
    ),
    _names("dynamo.sdk.lib.config", "ServiceConfig", _SDK),
    _names("dynamo.sdk.lib.decorators", "async_on_start on_shutdown", _SDK),
    _names(
        "dynamo.sdk",
        "DYNAMO_IMAGE api abstract_endpoint",
        None,
        "Images are built outside; HTTP routes are the frontend's.",
    ),
    # KV routing
    _names(
        "dynamo.llm",
        "KvMetricsPublisher KvMetricsAggregator AggregatedMetrics",
        _SDK,
        "Over NATS events. `create_endpoint(component)` may be awaited.",
    ),
    _names("dynamo.llm", "WorkerMetricsPublisher", _SDK),
    _names(
        "dynamo.llm",
        "KvEventPublisher KvIndexer OverlapScores",
        _SDK,
        "Worker ids are instance ids, strings. Lost events are noticed and requested again.",
    ),
    _names(
        "dynamo.llm",
        "KvRouter KvRouterConfig RouterConfig RouterMode",
        None,
        "The frontend routes by prefix and load. For a custom router use `KvIndexer`, "
        "`KvMetricsAggregator` and `client.direct`.",
    ),
    # transfers
    _names(
        "nixl._api",
        "nixl_agent nixl_agent_config",
        "tandem.sdk.nixl",
        'Descriptors travel as packed integers, never pickled. "VRAM" with tensors of the host is '
        "an error. `NixlConnector` has all of it in one class.",
    ),
    # engines
    _names(
        _BACKEND,
        "WorkerConfig",
        "tandem.sdk.dynamo.worker_config",
        "`tandem.sdk.WorkerConfig` and Dynamo's further fields. Those that Tandem does not support "
        "(tool_call_parser, media_decoder, ...) are errors when they are set.",
    ),
    _names(_BACKEND, "EngineConfig GenerateChunk GenerateRequest LLMEngine LlmRegistration", _SDK),
    _names(
        f"{_BACKEND}.engine",
        "EngineConfig GenerateChunk GenerateRequest LLMEngine LlmRegistration",
        _SDK,
    ),
    _names(f"{_BACKEND}.worker", "WorkerConfig", "tandem.sdk.dynamo.worker_config"),
    _names(
        f"{_BACKEND}.run",
        "run",
        "tandem.sdk.engine.run",
        "`run(EngineClass, argv=None)`; the exit status is 1 after a failed start, 70 after a "
        "second signal.",
    ),
    _names(
        f"{_BACKEND}.disagg",
        "enforce_prefill_max_tokens extract_prefill_result require_prefill_result",
        _SDK,
        "`require_prefill_result` raises PrefillResultMissing, a ValueError; another worker is "
        "tried.",
    ),
    _names("dynamo.common.constants", "DisaggregationMode", _SDK, "ENCODE is a name only."),
    _names(
        f"{_BACKEND}.publisher",
        "ComponentSnapshot KvEventSource PushSource ZmqSource",
        _SDK,
        "`ZmqSource` needs the extra `zmq`.",
    ),
    _names(
        f"{_BACKEND}.dp_rank", "forced_dp_rank validate_global_dp_rank", "tandem.sdk.dynamo.dp_rank"
    ),
    _names(
        f"{_BACKEND}.telemetry",
        "current_span start_span engine_trace_kwargs trace_headers",
        "tandem.sdk.worker.telemetry",
        "Does nothing where opentelemetry-api is not installed.",
    ),
    _names(
        f"{_BACKEND}.health_check",
        "HEALTH_CHECK_KEY bos_token_id_or build_health_check_payload is_probe "
        "parse_health_check_payload_cli",
        "tandem.sdk.engine.health_check",
    ),
    _names("dynamo.health_check", "HEALTH_CHECK_KEY", "tandem.sdk.engine.health_check"),
    _names(
        f"{_BACKEND}.metrics",
        "register_engine_registry register_global_registry",
        "tandem.sdk.engine.metrics",
    ),
    _names("dynamo._core.backend", "EngineMetrics", "tandem.sdk.engine.metrics"),
    _names(f"{_BACKEND}.logprobs", "parse_logprob_options", "tandem.sdk.dynamo.request_options"),
    _names(
        f"{_BACKEND}.logprobs",
        "extract_from_completion_output extract_from_sglang_meta",
        None,
        "Fill `log_probs` and `top_logprobs` from your engine's output.",
    ),
    _names(
        f"{_BACKEND}.sample_engine",
        "SampleLLMEngine",
        None,
        "Use `tandem.sdk.sample_engine.SampleEngine`; its tokens count up from the prompt's last "
        "token.",
    ),
    _names(
        f"{_BACKEND}.multimodal",
        "encoder_terminal_chunk extract_multimodal_kwargs require_encoder_result",
        None,
        "Requests are text and token ids only.",
    ),
    _names(
        _BACKEND,
        "BaseEngine DiffusionEngine RawEngine RawRequest RawResponseChunk Worker",
        None,
        "Engines answer with tokens or text; `run` serves them.",
    ),
    _names(
        "dynamo.common.utils.token_ids",
        "normalize_request_token_ids token_ids_len token_ids_to_list",
        "tandem.sdk.dynamo.request_options",
        "Not needed: Tandem's requests hold lists.",
    ),
    _names(
        f"{_BACKEND}.engine",
        "ForcedTokenSequenceSpec LogitsProcessorSpec PythonProcessorSpec is_generation_stage "
        "logits_processors_for_request serialize_logits_processor_entries "
        "deserialize_logits_processor_entries BaseEngine DiffusionEngine RawEngine",
        None,
        "Logits processors are the engine's own; engines answer with tokens or text.",
    ),
    _names(
        f"{_BACKEND}.metrics",
        "gather_with_labels ensure_prometheus_multiproc_dir",
        None,
        "`register_engine_registry` takes a registry as it is and adds the labels.",
    ),
    _names(
        "dynamo.llm.exceptions",
        "CannotConnect Cancelled ConnectionTimeout Disconnected DynamoException EngineShutdown "
        "InvalidArgument RouterQueueLimitExceeded StreamIncomplete Unknown WorkerUnavailable",
        "tandem.sdk.exceptions",
        "Most are other names of Tandem's own errors; `DynamoException` is TandemError.",
    ),
    _names(
        "dynamo.llm.exceptions",
        "HttpError",
        None,
        "Raise the specific error instead: InvalidArgument is 400, WorkerUnavailable 503.",
    ),
)

# Modules that are imported as such: `from dynamo.common.backend import telemetry`
MODULES = {
    f"{_BACKEND}.telemetry": "tandem.sdk.worker.telemetry",
    f"{_BACKEND}.dp_rank": "tandem.sdk.dynamo.dp_rank",
    f"{_BACKEND}.health_check": "tandem.sdk.engine.health_check",
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
