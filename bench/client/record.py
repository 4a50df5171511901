"""The record of one measured request. All times are seconds since the run began."""

import itertools
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """One request by the client's clock; an empty `error` means that it succeeded."""

    index: int
    scheduled_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    output_times_s: list[float] = field(default_factory=list)  # of output events
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_asked_tokens: int | None = None  # fixed output length, when one was asked for
    has_usage: bool = False
    status: int = 0
    prefill_place: str = ""  # local | remote, from the x-tandem-prefill header
    prefill_reason: str = ""  # of that place, from the x-tandem-prefill-reason header
    finish_reason: str = ""
    timeline_ms: dict[str, float] = field(default_factory=dict)  # of its decode worker, if sent
    predicted_ms: float = 0.0  # of `first_token` in it, by the worker; 0: not known
    error: str = ""  # kind
    error_message: str = ""
    unfinished: bool = False  # cut off by an interrupted run

    @property
    def succeeded(self) -> bool:
        return not self.error and not self.unfinished

    @property
    def ttft_s(self) -> float | None:
        return self.output_times_s[0] - self.scheduled_s if self.output_times_s else None

    @property
    def ttft_from_sent_s(self) -> float | None:
        return self.output_times_s[0] - self.sent_s if self.output_times_s else None

    @property
    def ttst_s(self) -> float | None:
        times = self.output_times_s
        if not times or self.num_output_tokens < 2:
            return None
        return (times[1] if len(times) > 1 else times[0]) - self.scheduled_s

    @property
    def e2el_s(self) -> float:
        return self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        if not self.output_times_s or self.num_output_tokens < 2:
            return None
        return (self.end_s - self.output_times_s[0]) / (self.num_output_tokens - 1)

    def gaps_s(self) -> list[float]:
        """Return the raw gaps between neighboring output events."""
        return [later - earlier for earlier, later in itertools.pairwise(self.output_times_s)]
