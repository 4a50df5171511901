"""The public names for authors of workers, engines and services.

`worker` is the runtime's face, `engine` the contract of an engine and `engine_worker` the worker
around it, `service` graphs, `kv` events, `nixl` transfers, `dynamo` the names of another system. It
imports `models`, `router`, `runtime` and `transfer`. Begin with `engine/llm_engine.py`, or with
`worker/distributed_runtime.py`.
"""

from tandem.runtime.wire.cluster_messages import StepCosts
from tandem.sdk import exceptions
from tandem.sdk.conformance.errors import ConformanceError
from tandem.sdk.conformance.kit import ConformanceReport, run_conformance
from tandem.sdk.conformance.streams import ConformanceSettings
from tandem.sdk.dynamo import dp_rank
from tandem.sdk.engine.disaggregation import (
    DisaggregationMode,
    enforce_prefill_max_tokens,
    extract_prefill_result,
    require_prefill_result,
)
from tandem.sdk.engine.llm_engine import LLMEngine
from tandem.sdk.engine.types import (
    ComponentSnapshot,
    EngineConfig,
    GenerateChunk,
    GenerateRequest,
    LlmRegistration,
)
from tandem.sdk.engine.worker_config import WorkerConfig
from tandem.sdk.engine_worker.run import run
from tandem.sdk.engine_worker.worker import EngineWorker
from tandem.sdk.exceptions import DynamoException, StreamIncomplete
from tandem.sdk.kv.aggregator import AggregatedMetrics, KvMetricsAggregator
from tandem.sdk.kv.events import KvEventPublisher
from tandem.sdk.kv.indexer import KvIndexer, OverlapScores
from tandem.sdk.kv.metrics import KvMetrics, KvMetricsPublisher, WorkerMetricsPublisher
from tandem.sdk.kv.sources import KvEventSource, PushSource, ZmqSource
from tandem.sdk.service.config import ServiceConfig
from tandem.sdk.service.context import dynamo_context, tandem_context
from tandem.sdk.service.decorators import (
    async_on_start,
    dynamo_endpoint,
    endpoint,
    liveness,
    on_shutdown,
    readiness,
    service,
)
from tandem.sdk.service.dependencies import (
    Answer,
    Dependency,
    RemoteEndpoint,
    RemoteService,
    depends,
    link,
)
from tandem.sdk.service.instance import serve_service
from tandem.sdk.worker import telemetry
from tandem.sdk.worker.annotated import Annotated
from tandem.sdk.worker.client import Client, Responses
from tandem.sdk.worker.cluster import find_cluster
from tandem.sdk.worker.context import Context
from tandem.sdk.worker.decorators import dynamo_worker, worker
from tandem.sdk.worker.distributed_runtime import Component, DistributedRuntime, Endpoint, Namespace
from tandem.sdk.worker.models import ModelInput, ModelType, register_llm, register_model
from tandem.sdk.worker.serving import ServedEndpoint

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
    "StepCosts",
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
