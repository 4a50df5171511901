"""The span of an HTTP request: its log line's facts, by the conventions for generative AI."""

from tandem.frontend.telemetry.request_log import AnswerSummary, RequestRecord
from tandem.runtime.tracing import otel
from tandem.runtime.tracing.spans import RequestSpan
from tandem.runtime.tracing.timeline import Timeline
from tandem.runtime.tracing.trace import TraceFile

# Endpoint |-> gen_ai.operation.name; the others generate nothing.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}


def begin_span(headers: dict[str, str], file: TraceFile) -> RequestSpan | None:
    """Return the span of a request, which `headers` name then; None where nothing takes spans."""
    if otel.tracer() is None and not file.is_open:
        return None
    return RequestSpan("frontend", headers, Timeline())


def end_span(
    span: RequestSpan, record: RequestRecord, answer: AnswerSummary | None, file: TraceFile
) -> None:
    """End the span of a request that is over and logged."""
    if not span.is_wanted(file):
        return
    own: dict[str, str | int | float] = {"key": record.key, "is_gone": int(record.is_gone)}
    known: dict[str, str | int | float] = {
        "http.request.method": "POST",
        "http.route": record.endpoint,
        "http.response.status_code": record.status,
    }
    operation = _OPERATIONS.get(record.endpoint)
    if operation is not None:
        known["gen_ai.operation.name"] = operation
    if record.model:
        known["gen_ai.request.model"] = known["gen_ai.response.model"] = record.model
    if answer is not None:
        own |= {"decode_instance": answer.instance_id, "decode_reason": answer.reason}
        if answer.first_s:
            span.timeline.mark("first_token", answer.first_s)
        if answer.tokens is not None:
            known["gen_ai.usage.input_tokens"] = answer.tokens.num_prompt
            known["gen_ai.usage.output_tokens"] = answer.tokens.num_generated
            known["gen_ai.usage.cache_read.input_tokens"] = answer.tokens.num_cached
        if answer.report is not None:
            own |= {"place": answer.report.place, "reason": answer.report.reason}
    name = f"{operation or record.endpoint} {record.model}".rstrip()
    is_failed = record.is_gone or record.status >= 500 or bool(record.error)
    error = ("client_gone" if record.is_gone else str(record.status)) if is_failed else ""
    span.end(file, record.request_id, own, error, name=name, conventions=known)
