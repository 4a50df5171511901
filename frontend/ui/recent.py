"""The last prompts of this frontend: why they went where they went, and the stages of handoffs."""

from collections import Counter, deque

from tandem.frontend.ui.state import HandoffState
from tandem.runtime.wire.messages import PrefillPlace, PrefillReport

_MAX_KEPT = 8
_MAX_CAUSES = 32  # of each place; more than there are, for an engine that invents them
_OTHER = "other"
Cause = tuple[PrefillPlace, str]


class Recent:
    """Notes of prompts while `is_open`, none otherwise: a page is looking."""

    def __init__(self) -> None:
        self.is_open = False
        self._num = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything but the number of the last handoff."""
        self.causes: Counter[Cause] = Counter()
        self.examples: dict[Cause, str] = {}
        self.begun: deque[HandoffState] = deque(maxlen=_MAX_KEPT)
        self.handoffs: deque[HandoffState] = deque(maxlen=_MAX_KEPT)

    def began(self, decode_instance: str, report: PrefillReport) -> None:
        """Note the first token of an answer."""
        if not self.is_open:
            return
        cause = (report.place, report.cause or _OTHER)
        if cause not in self.causes and len(self.causes) >= _MAX_CAUSES:
            cause = (report.place, _OTHER)
        self.causes[cause] += 1
        self.examples[cause] = report.reason
        if report.place == "remote":
            self.begun.append(self._handoff(decode_instance, report, report.timeline_ms))

    def ended(
        self, decode_instance: str, report: PrefillReport, timeline_ms: dict[str, float]
    ) -> None:
        """Note the whole timeline of an answer, if its prompt went to the prefill queue."""
        if self.is_open and "queued" in timeline_ms:
            self.handoffs.append(self._handoff(decode_instance, report, timeline_ms))

    def _handoff(
        self, decode_instance: str, report: PrefillReport, timeline_ms: dict[str, float]
    ) -> HandoffState:
        self._num += 1
        prefill_instance = report.prefill_instance or ""
        return HandoffState(self._num, report.place, decode_instance, prefill_instance, timeline_ms)
