"""The last decisions of a decode worker, for `tandem explain`."""

from collections import deque
from collections.abc import Mapping

import msgspec

from tandem.decode.admission import num_missed
from tandem.decode.decision import Decision
from tandem.decode.requests import ActiveRequest
from tandem.router.predict import Prediction
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.plane.server import Responder
from tandem.runtime.tracing.timeline import in_order
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.explain_messages import (
    MAX_REMEMBERED,
    ConsideredPlace,
    ExplainRequest,
    PromptExplanation,
    PromptExplanations,
    RoutedWorker,
)
from tandem.runtime.wire.messages import Routed, encode

_decode_request = decoder(ExplainRequest, InvalidRequestError)


class _Kept(msgspec.Struct, frozen=True):
    """The decisions and times of a request that are kept to explain it, without its tokens."""

    request_id: str
    first: Decision
    last: Decision
    routed: Routed | None
    timeline_ms: Mapping[str, float]  # by stage, in any order
    outcome: str
    num_prompt_tokens: int
    num_cached_tokens: int
    prefill_instance: str
    predicted_ms: float

    @staticmethod
    def of(active: ActiveRequest, outcome: str = "running") -> "_Kept | None":
        """Return the facts about a request; None before its prompt has a place."""
        first, last = active.first_decision, active.decision
        if first is None or last is None:
            return None
        return _Kept(
            active.request.request_id,
            first,
            last,
            active.request.routed,
            active.timeline.marks,
            outcome,
            active.seq.num_prompt_tokens,
            active.num_cached_tokens,
            active.prefill_instance or "",
            active.predicted_ms,
        )


_encode_kept = msgspec.msgpack.Encoder().encode
_decode_kept = msgspec.msgpack.Decoder(_Kept).decode


class Explanations:
    """The requests that run, `active`, and the last MAX_REMEMBERED that have ended."""

    def __init__(self, instance_id: str, active: Mapping[str, ActiveRequest]) -> None:
        self._me, self._active = instance_id, active
        # Encoded: the objects of so many requests would push those in use out of the caches.
        self._ended: deque[bytes] = deque(maxlen=MAX_REMEMBERED)

    def ended(self, active: ActiveRequest, outcome: str) -> None:
        """Keep a request that has ended."""
        if (kept := _Kept.of(active, outcome)) is not None:
            self._ended.append(_encode_kept(kept))

    async def send(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        """Answer an ExplainRequest."""
        wanted = _decode_request(payload).request_id
        running = (_Kept.of(active) for active in list(self._active.values()))
        every = [*map(_decode_kept, self._ended), *(kept for kept in running if kept is not None)]
        found = [_explained(self._me, kept) for kept in every if _is_of(kept.request_id, wanted)]
        answer.send(encode(PromptExplanations(found)))


def _is_of(request_id: str, wanted: str) -> bool:
    """Return True for the sequence of a request, or one of its several."""
    stem, _, number = request_id.rpartition("-")
    return request_id == wanted or (stem == wanted and number.isdecimal())


def _explained(me: str, kept: _Kept) -> PromptExplanation:
    first, last = kept.first, kept.last
    return PromptExplanation(
        request_id=kept.request_id,
        decode_instance=me,
        outcome=kept.outcome,
        num_prompt_tokens=kept.num_prompt_tokens,
        num_cached_tokens=kept.num_cached_tokens,
        routed=[] if kept.routed is None else _rows(kept.routed),
        considered=[_considered(me, first, each) for each in first.places],
        place=first.place,
        cause=first.cause,
        reason=first.reason,
        last_place=last.place,
        last_reason=last.reason,
        prefill_instance=kept.prefill_instance,
        ttft_target_ms=first.ttft_target_ms,
        itl_target_ms=first.itl_target_ms,
        predicted_ms=kept.predicted_ms,
        timeline_ms=in_order(kept.timeline_ms),
    )


def _rows(routed: Routed) -> list[RoutedWorker]:
    columns = (routed.instance_ids, routed.first_token_s, routed.costs_s, routed.fit)
    return [
        RoutedWorker(instance_id, first_token_s * 1e3, cost_s * 1e3, fit > 0)
        for instance_id, first_token_s, cost_s, fit in zip(*columns, strict=False)
    ]


def _considered(me: str, decision: Decision, prediction: Prediction) -> ConsideredPlace:
    is_local = not prediction.instance_id
    return ConsideredPlace(
        place="local" if is_local else "remote",
        instance_id=me if is_local else prediction.instance_id,
        wait_ms=prediction.wait_s * 1e3,
        compute_ms=prediction.compute_s * 1e3,
        transfer_ms=prediction.transfer_s * 1e3,
        first_token_ms=prediction.first_token_s * 1e3,
        cost_ms=prediction.cost_s * 1e3,
        num_missed=num_missed(decision, prediction),
    )
