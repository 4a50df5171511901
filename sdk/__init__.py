"""What authors of workers and engines import."""

from tandem.sdk import dp_rank, exceptions, telemetry
from tandem.sdk.client import Annotated, Client, Responses
from tandem.sdk.cluster import find_cluster
from tandem.sdk.conformance import ConformanceReport, run_conformance
from tandem.sdk.conformance_errors import ConformanceError
from tandem.sdk.conformance_streams import ConformanceSettings
from tandem.sdk.context import Context
from tandem.sdk.dependencies import Answer, Dependency, RemoteEndpoint, RemoteService, depends, link
from tandem.sdk.disaggregation import (
    DisaggregationMode,
    enforce_prefill_max_tokens,
    extract_prefill_result,
    require_prefill_result,
)
from tandem.sdk.distributed_runtime import Component, DistributedRuntime, Endpoint, Namespace
from tandem.sdk.engine import LLMEngine
from tandem.sdk.engine_types import (
    ComponentSnapshot,
    EngineConfig,
    GenerateChunk,
    GenerateRequest,
    LlmRegistration,
)
from tandem.sdk.engine_worker import EngineWorker
from tandem.sdk.exceptions import DynamoException, StreamIncomplete
from tandem.sdk.kv_aggregator import AggregatedMetrics, KvMetricsAggregator
from tandem.sdk.kv_events import KvEventPublisher
from tandem.sdk.kv_indexer import KvIndexer, OverlapScores
from tandem.sdk.kv_metrics import KvMetrics, KvMetricsPublisher, WorkerMetricsPublisher
from tandem.sdk.kv_sources import KvEventSource, PushSource, ZmqSource
from tandem.sdk.models import ModelInput, ModelType, register_llm, register_model
from tandem.sdk.run import run
from tandem.sdk.service import (
    async_on_start,
    dynamo_endpoint,
    endpoint,
    liveness,
    on_shutdown,
    readiness,
    service,
)
from tandem.sdk.service_config import ServiceConfig
from tandem.sdk.service_context import dynamo_context, tandem_context
from tandem.sdk.service_instance import serve_service
from tandem.sdk.serving import ServedEndpoint
from tandem.sdk.worker import dynamo_worker, worker
from tandem.sdk.worker_config import WorkerConfig

__all__ = [
    "AggregatedMetrics",
    "Annotated",
    "Answer",
    "Client",
    "Component",
    "ComponentSnapshot",
    "ConformanceError",
    "ConformanceReport",
    "ConformanceSettings",
    "Context",
    "Dependency",
    "DisaggregationMode",
    "DistributedRuntime",
    "DynamoException",
    "Endpoint",
    "EngineConfig",
    "EngineWorker",
    "GenerateChunk",
    "GenerateRequest",
    "KvEventPublisher",
    "KvEventSource",
    "KvIndexer",
    "KvMetrics",
    "KvMetricsAggregator",
    "KvMetricsPublisher",
    "LLMEngine",
    "LlmRegistration",
    "ModelInput",
    "ModelType",
    "Namespace",
    "OverlapScores",
    "PushSource",
    "RemoteEndpoint",
    "RemoteService",
    "Responses",
    "ServedEndpoint",
    "ServiceConfig",
    "StreamIncomplete",
    "WorkerConfig",
    "WorkerMetricsPublisher",
    "ZmqSource",
    "async_on_start",
    "depends",
    "dp_rank",
    "dynamo_context",
    "dynamo_endpoint",
    "dynamo_worker",
    "endpoint",
    "enforce_prefill_max_tokens",
    "exceptions",
    "extract_prefill_result",
    "find_cluster",
    "link",
    "liveness",
    "on_shutdown",
    "readiness",
    "register_llm",
    "register_model",
    "require_prefill_result",
    "run",
    "run_conformance",
    "serve_service",
    "service",
    "tandem_context",
    "telemetry",
    "worker",
]
