"""The effects of a collected step on its sequences: tokens, ends, failures."""

import logging
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from tandem.engine.schedule.outputs import SequenceOutput
from tandem.engine.schedule.scheduler import Scheduler
from tandem.engine.schedule.sequence import MAX_FORCED_TOKENS, Chunk, Sequence, SequenceStatus
from tandem.runtime.errors import InternalError, InvalidRequestError, TandemError, UnavailableError
from tandem.runtime.wire.messages import TokenLogprobs
from tandem.runtime.wire.prompt_logprobs import PromptLogprobs

logger = logging.getLogger(__name__)


class SampledToken(NamedTuple):
    """One drawn token; `logprobs` where the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


class ScoredPart(NamedTuple):
    """Log probabilities of a sequence's prompt tokens after position `start`."""

    seq: Sequence
    start: int
    logprobs: PromptLogprobs


class UndrawnError(InternalError):
    """Some rows of a step drew no token.

    `reasons` has their errors, by row; None: the row waits for its mask. `tokens` are meaningless
    for them.
    """

    def __init__(
        self, tokens: SequenceOf[SampledToken], reasons: dict[int, TandemError | None]
    ) -> None:
        errors = [str(error) for error in reasons.values() if error is not None]
        super().__init__("; ".join(errors) or "a row waits for its mask")
        self.tokens = tokens
        self.reasons = reasons


class DeviceLostError(UnavailableError):
    """The device answers this process no more; only a new process can use it."""


def still_running(chunks: list[Chunk]) -> list[Sequence]:
    """Return the sequences of `chunks` that did not end after the launch."""
    return [chunk.seq for chunk in chunks if chunk.seq.status is SequenceStatus.RUNNING]


def count_step(
    scheduler: Scheduler, chunks: list[Chunk], tokens: SequenceOf[SampledToken | None]
) -> list[SequenceOutput]:
    """Count the tokens of a step that succeeded, and end the sequences that they end.

    The tokens of a sequence that ended after the launch are discarded.
    """
    outputs: list[SequenceOutput] = []
    next_token, running = iter(tokens).__next__, SequenceStatus.RUNNING
    for seq, _, end, samples in chunks:
        token = next_token() if samples else None
        if seq.status is not running:
            continue
        if token is None:
            if seq.prefill_only:
                outputs.append(_output(seq, []))
            continue
        token_id, is_last = token.token_id, end + 1 >= seq.max_num_tokens
        if seq.matcher is not None and seq.matcher.forced:
            outputs.append(_count_with_forced(scheduler, seq, end, token))
            continue
        if is_last or token_id in seq.stop_ids or token.logprobs is not None:
            outputs.append(count_token(scheduler, seq, end, token))
            continue
        # The common case of count_token without its calls: there are hundreds per step.
        seq.token_ids[end] = token_id
        num_cached = seq.num_cached_tokens
        outputs.append(
            SequenceOutput(
                seq.request_id, [token_id], None, None, None, num_cached, end, None, None, seq
            )
        )
    return outputs


def keep_prompt_scores(parts: list[ScoredPart]) -> None:
    """Keep the log probabilities of the prompts of a collected step."""
    for seq, start, logprobs in parts:
        if seq.status is SequenceStatus.RUNNING and seq.prompt_scores is not None:
            seq.prompt_scores.put(start, logprobs)


def count_token(
    scheduler: Scheduler, seq: Sequence, position: int, token: "SampledToken"
) -> SequenceOutput:
    """Put a token at its position, which may be PENDING; end the sequence after its last."""
    return _count(scheduler, seq, position, token.token_id, token.logprobs)


def _count(
    scheduler: Scheduler,
    seq: Sequence,
    position: int,
    token_id: int,
    logprobs: TokenLogprobs | None,
) -> SequenceOutput:
    finish_reason = seq.finish_reason_at(position, token_id)
    if finish_reason == "stop":
        output = _output(seq, [])
        output.stop_token_id = token_id
        if seq.sampling.prompt_logprobs and logprobs is not None:
            output.logprobs = [logprobs]
    elif position >= seq.max_num_tokens:
        output = _output(seq, [])
    else:
        seq.token_ids[position : position + 1] = [token_id]
        output = _output(seq, [token_id])
        if logprobs is not None:
            output.logprobs = [logprobs]
    if seq.prompt_scores is not None:
        output.prompt_logprobs = seq.prompt_scores.whole()
        seq.prompt_scores = None
    if finish_reason is not None:
        output.finish_reason = finish_reason
        scheduler.finish(seq)
    return output


def _count_with_forced(
    scheduler: Scheduler, seq: Sequence, position: int, token: "SampledToken"
) -> SequenceOutput:
    """Count a drawn token and those that its grammar forces after it, which are not drawn.

    The next step computes them. A draw depends on its position alone: the answer is the same.
    """
    assert seq.matcher is not None
    output, logprobs = count_token(scheduler, seq, position, token), None
    for token_id in seq.matcher.forced[1:MAX_FORCED_TOKENS]:
        if output.finish_reason is not None:
            break
        if (num_top := seq.sampling.logprobs) is not None:
            logprobs = TokenLogprobs(logprob=0.0, top=[(token_id, 0.0)][:num_top])
        forced = _count(scheduler, seq, seq.num_tokens, token_id, logprobs)
        output.token_ids += forced.token_ids
        if forced.logprobs is not None:
            output.logprobs = [*(output.logprobs or []), *forced.logprobs]
        output.finish_reason, output.stop_token_id = forced.finish_reason, forced.stop_token_id
    return output


def fail_undrawn(
    scheduler: Scheduler, chunks: list[Chunk], undrawn: UndrawnError
) -> list[SequenceOutput]:
    """End the running sequences of a step that cannot get a token."""
    sampled = [chunk.seq for chunk in chunks if chunk.samples]
    outputs: list[SequenceOutput] = []
    for row, error in undrawn.reasons.items():
        if error is not None and sampled[row].status is SequenceStatus.RUNNING:
            outputs += fail(scheduler, [sampled[row]], error)
    return outputs


def drawn_chunks(
    scheduler: Scheduler, chunks: list[Chunk], undrawn: UndrawnError
) -> "tuple[list[Chunk], list[SampledToken]]":
    """Return a step's chunks and tokens as if it had not computed the rows that drew none."""
    rest: list[Chunk] = []
    tokens: list[SampledToken] = []
    row = 0
    for chunk in chunks:
        seq, start, end, samples = chunk
        if samples and row in undrawn.reasons:
            scheduler.put_off(seq, end)
            chunk = Chunk(seq, start, end - 1, False)
        elif samples:
            tokens.append(undrawn.tokens[row])
        row += samples
        rest.append(chunk)
    return rest, tokens


def fail(scheduler: Scheduler, seqs: list[Sequence], error: Exception) -> list[SequenceOutput]:
    """End waiting and running sequences with `error`, or InternalError if it is no TandemError."""
    if isinstance(error, InvalidRequestError):  # of a client, by the grammar of its answer
        logger.info("request %s: %s", ", ".join(seq.request_id for seq in seqs), error)
    else:
        logger.error("a step failed, and with it %d sequences", len(seqs), exc_info=error)
    typed = error
    if not isinstance(typed, TandemError):
        typed = InternalError(f"the engine failed: {type(error).__name__}")
    for seq in seqs:
        scheduler.finish(seq)
    return [
        SequenceOutput(seq.request_id, [], finish_reason="error", error=typed, seq=seq)
        for seq in seqs
    ]


def _output(seq: Sequence, token_ids: list[int]) -> SequenceOutput:
    return SequenceOutput(
        seq.request_id,
        token_ids,
        num_cached_tokens=seq.num_cached_tokens,
        num_computed_tokens=seq.num_computed_tokens,
        seq=seq,
    )
