"""Prometheus metrics of a decode worker."""

from tandem.decode.requests import ActiveRequest
from tandem.runtime.messages import LoadReport
from tandem.runtime.metrics import counter, gauge, histogram


class DecodeMetrics:
    """Counts of decisions, of how handoffs ended, and of what was dropped on the way."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._requests = counter(
            "decode_requests_total", "Finished streams by outcome", ["model", "outcome"]
        )
        self._prefills = counter(
            "decode_prefills_total", "Prompts by place and cause", ["model", "place", "cause"]
        )
        self._handoffs = counter(
            "decode_handoffs_total", "Remote prefills by how they ended", ["model", "end"]
        )
        self._dropped = counter(
            "decode_handoff_messages_dropped_total",
            "Messages of handoffs that were not applied",
            ["model", "reason"],
        )
        self._first_token = histogram(
            "decode_first_token_seconds",
            "From the request's arrival at the worker to its first token",
            ["model", "place"],
        )
        self._landed = histogram(
            "decode_handoff_stage_seconds",
            "From the request's arrival to each stage of its handoff",
            ["model", "stage"],
        )
        self._blocks = gauge("decode_kv_blocks", "KV blocks by state", ["model", "state"])
        self._sequences = gauge("decode_sequences", "Sequences by state", ["model", "state"])

    def finished(self, active: ActiveRequest) -> None:
        """One stream has ended, for whatever reason."""
        error = None if active.done.cancelled() else active.done.exception()
        outcome = "finished" if error is None else getattr(error, "code", "internal")
        self._requests.labels(self._model, outcome).inc()
        if active.decision is None:
            return
        place = active.decision.place
        self._prefills.labels(self._model, place, active.decision.cause).inc()
        for stage, ms in active.timeline.ms().items():
            if stage == "first_token":
                self._first_token.labels(self._model, place).observe(ms / 1e3)
            else:
                self._landed.labels(self._model, stage).observe(ms / 1e3)

    def handoff_ended(self, end: str) -> None:
        """`end`: admitted, cancelled, or a cause that `remote._end_of` names."""
        self._handoffs.labels(self._model, end).inc()

    def dropped(self, reason: str, count: int) -> None:
        self._dropped.labels(self._model, reason).inc(count)

    def loaded(self, load: LoadReport) -> None:
        self._blocks.labels(self._model, "total").set(load.num_blocks)
        self._blocks.labels(self._model, "free").set(load.num_free_blocks)
        self._blocks.labels(self._model, "cached").set(load.num_cached_blocks)
        self._sequences.labels(self._model, "running").set(load.num_running)
        self._sequences.labels(self._model, "waiting").set(load.num_waiting)
