"""The OTLP exporter of a process; imported only where the environment names a collector."""

import logging
import os

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

logger = logging.getLogger(__name__)

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def new_provider(component: str, instance_id: str) -> TracerProvider:
    """Return a provider that sends spans from a thread, out of a bounded queue.

    The variables of OpenTelemetry say where to, which part of the traces, and under which names.
    """
    protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), "http/protobuf")
    if protocol != "http/protobuf":
        logger.warning("traces are sent by http/protobuf; %s is not supported", protocol)
    ours = {"service.name": f"tandem-{component}", "service.instance.id": instance_id}
    given = OTELResourceDetector().detect().attributes
    resource = Resource.create({name: ours[name] for name in ours if name not in given})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
