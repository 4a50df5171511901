"""An open request of a decode worker."""

import asyncio
from dataclasses import dataclass, field

from tandem.decode.decision import Decision
from tandem.engine.schedule.outputs import SequenceOutput
from tandem.engine.schedule.sequence import Sequence
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import InvalidRequestError, NotFoundError, TandemError
from tandem.runtime.plane.server import Responder
from tandem.runtime.tracing.spans import RequestSpan
from tandem.runtime.tracing.timeline import Timeline
from tandem.runtime.tracing.trace import TraceFile
from tandem.runtime.wire.bounds import MAX_TEXT
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.messages import (
    FinishReason,
    GenerateRequest,
    PrefillReport,
    TokenDelta,
    TokenLogprobs,
    encode,
)
from tandem.runtime.wire.prompt_logprobs import PromptLogprobs
from tandem.runtime.wire.request_bounds import checked_token_ids

_decode_request = decoder(GenerateRequest, InvalidRequestError)


@dataclass(slots=True)
class ActiveRequest:
    """One generate stream: its request, the placement of its prompt, and its client.

    `done` resolves after the last delta was sent, or raises the typed error that ended the stream.
    Owned by the event loop; the engine thread reads `request` and `seq` and calls `place`.
    """

    request: GenerateRequest
    seq: Sequence
    context: RequestContext
    responder: Responder
    done: asyncio.Future[None]
    timeline: Timeline = field(default_factory=Timeline)
    span: RequestSpan = field(init=False)
    decision: Decision | None = None
    first_decision: Decision | None = None  # before a remote prefill was given up
    # Of the time to the first token, what `decision` does not count: until it was made, mostly for
    # a step's end, and for other prompts in the last step of this one.
    uncounted_ms: float = 0.0
    prefill_instance: str | None = None
    handoff_id: str = ""  # hex; also in the prefill worker's trace
    num_cached_tokens: int = 0
    num_sent_tokens: int = 0
    reported: bool = False
    stepped: bool = False  # the second token was generated, by decoding

    def __post_init__(self) -> None:
        self.span = RequestSpan("decode", self.context.headers, self.timeline)

    @classmethod
    def from_wire(
        cls,
        payload: bytes,
        context: RequestContext,
        responder: Responder,
        *,
        model: str,
        vocab_size: int,
    ) -> "ActiveRequest":
        """Decode a GenerateRequest.

        NotFoundError for another model, InvalidRequestError for anything out of bounds.
        """
        request = _decode_request(payload)
        if request.model != model:
            raise NotFoundError(f"this worker serves {model}, not {request.model}")
        if request.images:
            raise InvalidRequestError(f"the workers of {model} see no images", param="prompt")
        token_ids = checked_token_ids(request, vocab_size)
        seq = Sequence(
            request_id=request.request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids) - request.num_generated,
            sampling=request.sampling,
            stop=request.stop,
            cache_salt=request.cache_salt,
        )
        done = asyncio.get_running_loop().create_future()
        return cls(request, seq, context, responder, done)

    def place(self, decision: Decision, shared_s: float = 0.0) -> None:
        """Note the place of the prompt as it is decided now; others add `shared_s` to its step."""
        self.decision = self.first_decision = decision
        self.uncounted_ms = (self.timeline.elapsed_s() + shared_s) * 1e3

    def place_again(self, decision: Decision) -> None:
        """Note that the prompt is computed elsewhere after all; the next delta reports it."""
        self.decision, self.prefill_instance, self.reported = decision, None, False

    @property
    def predicted_ms(self) -> float:
        """The predicted time from receiving the request to its first token; 0: not known."""
        predicted_ms = self.decision.predicted_ms if self.decision is not None else 0.0
        return predicted_ms and self.uncounted_ms + predicted_ms

    def emit(self, output: SequenceOutput) -> None:
        """Send the output of one step; the last one resolves `done`."""
        if output.error is not None:
            self.fail(output.error)
            return
        if not self.reported:
            self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.send(
            output.token_ids,
            output.logprobs,
            output.finish_reason,
            output.stop_token_id,
            output.prompt_logprobs,
        )

    def send(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        """Send tokens in order; the first delta carries the prefill report, and each new one."""
        if self.done.done():
            return
        report = None if self.reported else self._report()
        self.num_sent_tokens += len(token_ids)
        if not self.stepped and self.num_sent_tokens + (stop_token_id is not None) > 1:
            self.stepped = True
            self.timeline.mark("first_step")
        whole_ms = None if finish_reason is None else self.timeline.ms()
        delta = TokenDelta(
            token_ids, finish_reason, logprobs, report, stop_token_id, whole_ms, prompt_logprobs
        )
        self.responder.send(encode(delta))
        if finish_reason is not None:
            self.responder.end()
            self.done.set_result(None)

    def fail(self, error: TandemError) -> None:
        """End the stream with a typed error, once."""
        if not self.done.done():
            self.done.set_exception(error)

    @property
    def outcome(self) -> str:
        """The outcome of an ended stream: `finished`, or the code of its error."""
        error = None if self.done.cancelled() else self.done.exception()
        return "finished" if error is None else str(getattr(error, "code", "internal"))

    def record_in(self, trace: TraceFile) -> None:
        """Add this ended request to the worker's trace, and end its span."""
        if not self.span.is_wanted(trace):
            return
        args: dict[str, str | int | float] = {
            "outcome": self.outcome,
            "handoff_id": self.handoff_id,
            "prefill_instance": self.prefill_instance or "",
            "num_prompt_tokens": self.seq.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_sent_tokens": self.num_sent_tokens,
        }
        if self.decision is not None:
            args |= {
                "place": self.decision.place,
                "cause": self.decision.cause,
                "reason": self.decision.reason,
                "predicted_ms": round(self.predicted_ms, 1),
            }
        error = "" if self.outcome == "finished" else self.outcome
        conventions = {"gen_ai.request.model": self.request.model}
        self.span.end(trace, self.request.request_id, args, error, conventions=conventions)

    def _report(self) -> PrefillReport:
        self.reported = True
        self.timeline.mark("first_token")
        assert self.decision is not None
        return PrefillReport(
            place=self.decision.place,
            reason=self.decision.reason[:MAX_TEXT],
            num_cached_tokens=self.num_cached_tokens,
            prefill_instance=self.prefill_instance,
            timeline_ms=self.timeline.ms(),
            cause=self.decision.cause,
            predicted_ms=round(self.predicted_ms, 3),
        )
