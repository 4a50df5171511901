"""The end of every HTTP request: one line in the log, and its metrics."""

import logging
import time
from collections.abc import Callable

import msgspec

from tandem.frontend.telemetry.metrics import FrontendMetrics
from tandem.runtime.wire.messages import PrefillReport

logger = logging.getLogger(__name__)

_CLIENT_CLOSED_REQUEST = 499


class TokenCounts(msgspec.Struct, frozen=True, gc=False):
    """The tokens of a request, over all its prompts and choices."""

    num_prompt: int
    num_generated: int
    num_cached: int


NO_TOKENS = TokenCounts(0, 0, 0)


class AnswerSummary(msgspec.Struct, frozen=True, gc=False):
    """The facts about an answer, complete or not."""

    first_s: float  # perf_counter at the first token or text; 0 before it
    instance_id: str  # of the worker that answers; empty before there is one
    tokens: TokenCounts | None  # None for a model that reads and writes text
    report: PrefillReport | None  # of the first prompt's prefill; None before its first token
    reason: str  # of the choice of this worker


class RequestRecord(msgspec.Struct):
    """The facts about one request, gathered while it is answered."""

    request_id: str
    endpoint: str
    key: str = ""  # name of the API key; empty without keys
    arrived_s: float = msgspec.field(default_factory=time.perf_counter)
    model: str = ""  # empty until it is known to exist
    summarize: Callable[[], AnswerSummary] | None = None  # None until the request is planned
    error: str = ""
    ignored: str = ""  # fields
    status: int = 0
    is_gone: bool = False  # the client, before the end of its answer


def log_request(record: RequestRecord, metrics: FrontendMetrics) -> AnswerSummary | None:
    """Log and count a request that is over. Return the facts about its answer."""
    status = _CLIENT_CLOSED_REQUEST if record.is_gone else record.status
    duration_s = time.perf_counter() - record.arrived_s
    answer = None if record.summarize is None else record.summarize()
    metrics.requests.add(record.model, record.endpoint, str(status))
    if record.key:
        tokens = (answer and answer.tokens) or NO_TOKENS
        metrics.count_key(record.key, status, tokens.num_prompt, tokens.num_generated)
    if record.is_gone:
        metrics.disconnects.add(record.model)
    if record.model:
        metrics.inflight.add(record.model, amount=-1.0)
        metrics.duration.labels(record.model).observe(duration_s)
    if answer is not None:
        _observe(answer, record, metrics)
    logger.info(
        "request %s %s%s: %d in %.1f ms%s%s%s",
        record.request_id,
        record.endpoint,
        f" by {record.key}" if record.key else "",
        status,
        duration_s * 1e3,
        "" if answer is None else _details(answer, record.arrived_s),
        f", ignored: {record.ignored}" if record.ignored else "",
        f": {record.error}" if record.error else "",
    )
    return answer


def _observe(answer: AnswerSummary, record: RequestRecord, metrics: FrontendMetrics) -> None:
    tokens, model = answer.tokens, record.model
    if answer.first_s:
        metrics.time_to_first_token.labels(model).observe(answer.first_s - record.arrived_s)
    if tokens is None:
        return
    metrics.input_tokens.labels(model).observe(tokens.num_prompt)
    if answer.first_s:
        metrics.output_tokens.labels(model).observe(tokens.num_generated)
        metrics.cached_tokens.labels(model).observe(tokens.num_cached)


def _details(answer: AnswerSummary, arrived_s: float) -> str:
    first = f"{(answer.first_s - arrived_s) * 1e3:.1f} ms" if answer.first_s else "none"
    instance_id = answer.instance_id or "none"
    tokens, report = answer.tokens, answer.report
    if tokens is None:
        return f", first answer {first}, text model at {instance_id}"
    prefill = "none" if report is None else report.place
    reason = "" if report is None else report.reason
    return (
        f", ttft {first}, {tokens.num_prompt}+{tokens.num_generated} tokens, "
        f"{tokens.num_cached} cached, prefill {prefill} at {instance_id} ({reason})"
    )
