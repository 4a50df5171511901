"""The generation of a plan: every choice on a decode worker, its tokens to a writer."""

import asyncio
import time
from typing import Protocol

import msgspec

from tandem.frontend.access.limits import Header
from tandem.frontend.chat.requests import ChatRequest
from tandem.frontend.chat.responses import ChoiceTimeline, Usage, usage
from tandem.frontend.generation.choice_text import ChoiceText
from tandem.frontend.generation.deps import FrontendDeps
from tandem.frontend.generation.failover import Failover, decision_headers
from tandem.frontend.generation.plan import Choice, Plan, prefix_hashes
from tandem.frontend.http.api import Work
from tandem.frontend.http.exchange import Exchange, header_value
from tandem.frontend.parsers.plain import PlainParser
from tandem.frontend.telemetry.request_log import AnswerSummary, TokenCounts
from tandem.router.decision import RoutingDecision
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import (
    ConnectionLostError,
    IncompleteError,
    InvalidRequestError,
    ProtocolError,
    TandemError,
)
from tandem.runtime.plane.response_stream import ResponseStream
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.messages import (
    GenerateRequest,
    PrefillReport,
    TokenDelta,
    encode,
    pack_tokens,
)
from tandem.runtime.wire.prompt_logprobs import PromptLogprobs

_decode_delta = decoder(TokenDelta)


class ChoiceRun(msgspec.Struct):
    """A choice being generated. It outlives the workers that fail."""

    choice: Choice
    text: ChoiceText
    failover: Failover
    generated: list[int] = []  # tokens of the answer so far
    has_begun: bool = False  # a worker has answered, and the writer has begun the choice
    began_with: RoutingDecision | None = None  # the choice of the worker that began it
    report: PrefillReport | None = None  # of the worker that began it
    timeline_ms: dict[str, float] | None = None  # the whole, where one worker generated everything
    prompt_logprobs: PromptLogprobs | None = None  # of the worker that began it
    num_image_tokens: int = 0  # that its worker put in the places of the images' marks
    first_token_s: float = 0.0  # perf_counter; 0 before it
    last_token_s: float = 0.0  # perf_counter

    @property
    def decision(self) -> RoutingDecision:
        """The choice of the worker that began; until then, of the one that was asked last."""
        return self.began_with or self.failover.decision

    @property
    def instance_id(self) -> str:
        """The worker of `decision`; empty before there is one."""
        return self.decision.instance_id


class Answer(msgspec.Struct):
    """The choices of a request while they are generated."""

    plan: Plan
    runs: list[ChoiceRun]
    num_open: int  # choices that have not ended

    def tokens(self) -> TokenCounts:
        """Return the tokens so far; those of a prompt count once, whatever its choices."""
        n = len(self.runs) // len(self.plan.prompts)
        num_prompt, num_generated, num_cached = self.plan.num_prompt_tokens, 0, 0
        for index, run in enumerate(self.runs):
            num_generated += run.text.num_tokens
            if index % n:
                continue
            num_prompt += run.num_image_tokens
            if run.report is not None:
                num_cached += run.report.num_cached_tokens
        return TokenCounts(num_prompt, num_generated, num_cached)

    def usage(self) -> Usage:
        """Return the token counts of the response."""
        tokens = self.tokens()
        return usage(tokens.num_prompt, tokens.num_generated, tokens.num_cached)

    def summary(self) -> AnswerSummary:
        """Return the facts for the log; worker and prefill are those of the first choice."""
        first_s = min([run.first_token_s for run in self.runs if run.has_begun], default=0.0)
        run = self.runs[0]
        return AnswerSummary(
            first_s, run.instance_id, self.tokens(), run.report, run.decision.reason
        )

    def headers(self, run: ChoiceRun, exchange: Exchange) -> list[Header]:
        """Return the headers about the workers of a choice, and the ids of the request."""
        headers = decision_headers(run.decision)
        if run.report is not None:
            headers.append((b"x-tandem-prefill", run.report.place.encode()))
            headers.append((b"x-tandem-prefill-reason", header_value(run.report.reason)))
        return headers + exchange.id_headers(self.plan.context.id)

    def timeline(self, run: ChoiceRun) -> ChoiceTimeline | msgspec.UnsetType:
        """Return the timeline of a finished choice, if its caller asked for it.

        It ends with the first token where a stop string ended the choice or several workers
        generated it.
        """
        if not self.plan.wants_timeline or run.report is None:
            return msgspec.UNSET
        report = run.report
        return ChoiceTimeline(
            report.place,
            run.timeline_ms or report.timeline_ms,
            report.predicted_ms or msgspec.UNSET,
        )


class AnswerWriter(Protocol):
    """Makes the response of generated tokens: bytes to send now; a whole one comes at its end.

    Each method is called for each choice.
    """

    async def begin(self, run: ChoiceRun) -> bytes:
        """Begin a choice. Its first tokens have come, and its report is set."""

    def take(self, run: ChoiceRun, deltas: list[TokenDelta]) -> bytes:
        """Take tokens of a choice."""

    async def end(self, run: ChoiceRun) -> bytes:
        """End a choice, which is counted as open no more."""


def new_answer(plan: Plan, deps: FrontendDeps, owner: str, named: str) -> Answer:
    """Return an answer of which nothing is generated yet, for the holder of an API key.

    Its first choice goes to the worker `named` by the endpoint picker, if that is there.
    """
    model, body = plan.model, plan.body
    output = plan.format.output
    shows_marks = output is not None and model.text.detokenizers.has_special(output.all_marks)
    with_special = body.skip_special_tokens is False or shows_marks

    def new_run(choice: Choice) -> ChoiceRun:
        text = ChoiceText(
            model.text.detokenizers,
            # completions are the text of the model as it is
            plan.format.new_parser(body) if isinstance(body, ChatRequest) else PlainParser(),
            body.stop_strings,
            choice.request.stop.min_tokens,
            choice.prompt.token_ids,
            with_special=with_special,
            shows_stop=bool(body.include_stop_str_in_output),
            num_top=None if body.prompt_logprobs is None else body.num_logprobs,
            lists_ids=bool(body.return_tokens_as_token_ids),
        )
        first = named if choice.index == 0 else ""
        failover = Failover(choice.request.request_id, model, plan.context, deps, owner, first)
        return ChoiceRun(choice, text, failover)

    return Answer(plan, [new_run(choice) for choice in plan.choices], len(plan.choices))


async def generate(
    answer: Answer, writer: AnswerWriter, exchange: Exchange, deps: FrontendDeps
) -> None:
    """Generate all choices. The first error cancels the others and is raised."""
    works = [
        run.failover.run(_ChoiceSequence(run, answer, writer, exchange, deps))
        for run in answer.runs
    ]
    try:
        if len(works) == 1:
            await works[0]
        else:
            await all_of(works, answer.plan.context)
    except InvalidRequestError as error:
        raise answer.plan.translated(error) from error


async def all_of(works: list[Work], context: RequestContext) -> None:
    """Do the parts of a request beside one another. The first error cancels the others."""
    errors: list[BaseException] = []

    async def beside_others(work: Work) -> None:
        try:
            await work
        except BaseException as error:
            errors.append(error)
            context.cancel("another part of this request failed")

    await asyncio.gather(*map(beside_others, works))
    if errors:
        raise errors[0]


class _ChoiceSequence:
    """One choice between its workers and its client: a `WorkerSequence`."""

    def __init__(
        self,
        run: ChoiceRun,
        answer: Answer,
        writer: AnswerWriter,
        exchange: Exchange,
        deps: FrontendDeps,
    ) -> None:
        self._run = run
        self._text = run.text
        self._answer, self._plan = answer, answer.plan
        self._writer = writer
        self._exchange = exchange
        self._metrics = deps.metrics
        self._recent = deps.recent
        self._gaps = deps.metrics.inter_token_latency.labels(answer.plan.head.model)
        self._body = b""  # of the stream, to be sent before anything else
        self._is_given_up = False  # by its worker
        self._timeline_ms: dict[str, float] | None = None  # on the last delta

    @property
    def num_generated(self) -> int:
        return len(self._run.generated)

    @property
    def ttft_target_s(self) -> float | None:
        targets = self._run.choice.request.targets
        return None if targets is None or targets.ttft_ms is None else targets.ttft_ms / 1e3

    def blocks(self, with_hashes: bool) -> tuple[int, list[bytes]]:
        block_size = self._plan.model.card.block_size
        prompt, generated = self._run.choice.prompt.token_ids, self._run.generated
        num_blocks = -(-(len(prompt) + len(generated)) // block_size)
        # the tokens of an image do not name it, and the worker puts others in their place
        if not with_hashes or self._run.choice.request.images:
            return num_blocks, []
        salt = self._run.choice.request.cache_salt
        return num_blocks, prefix_hashes(prompt + generated, block_size, salt)

    def payload(self) -> bytes:
        request = resume_after(self._run.choice.request, self._run.generated)
        deadline_ms = int(self._plan.context.remaining_s() * 1e3)
        routed = self._run.failover.decision.routed
        return encode(msgspec.structs.replace(request, deadline_ms=deadline_ms, routed=routed))

    async def follow(self, stream: ResponseStream) -> None:
        text = self._run.text
        try:
            await self._take_all(stream)
        except StopAsyncIteration:
            raise ConnectionLostError("the worker ended a sequence without a reason") from None
        finally:
            if text.finish_reason is None or text.is_stopped:
                stream.cancel()

    async def settle(self, error: TandemError) -> bool:
        """End the choice if its worker was lost after the last token, before the end."""
        run = self._run
        if not run.has_begun or len(run.generated) < run.choice.request.stop.max_tokens:
            return False
        await self._end(self._writer.take(run, [TokenDelta([], "length")]))
        return True

    async def _take_all(self, stream: ResponseStream) -> None:
        """Pass deltas on until the choice ends: all that have arrived, in one write."""
        run, text, exchange = self._run, self._text, self._exchange
        deltas = list(map(_decode_delta, await stream.take()))
        self._body, self._is_given_up = await self._begin(deltas[0]), False
        self._take(deltas)
        while text.finish_reason is None:
            if exchange.is_started:  # the head goes with the first write
                await exchange.write(self._body)
                self._body = b""
            if self._is_given_up:
                raise IncompleteError("the worker canceled the sequence")
            await stream.pass_on(self._pass_on)
        if run.failover.num_migrations == 0:
            run.timeline_ms = self._timeline_ms
        if run.timeline_ms is not None and run.report is not None:
            self._recent.ended(run.instance_id, run.report, run.timeline_ms)
        await self._end(self._body)

    def _pass_on(self, items: list[bytes]) -> bool:
        """Take deltas and send their bytes. False where the request's task has to go on."""
        self._take([_decode_delta(item) for item in items])
        if self._text.finish_reason is not None or self._is_given_up:
            return False
        if self._body:
            if not self._exchange.write_now(self._body):
                return False
            self._body = b""
        return True

    def _take(self, deltas: list[TokenDelta]) -> None:
        """Take deltas, and add their bytes to those to send."""
        run, text = self._run, self._text
        num_tokens = text.num_tokens
        for delta in deltas:
            run.generated += delta.token_ids
            if delta.prefill is not None and run.failover.num_migrations == 0:
                run.report = delta.prefill  # again where a handoff failed after its first token
        if delta.finish_reason is not None:
            self._timeline_ms = delta.timeline_ms
            if delta.finish_reason == "cancelled":
                self._is_given_up = True
                deltas[-1] = msgspec.structs.replace(delta, finish_reason=None)
        self._body += self._writer.take(run, deltas)
        if num_tokens and (num_new := text.num_tokens - num_tokens):
            now = time.perf_counter()
            self._gaps.observe((now - run.last_token_s) / num_new, num_new)
            run.last_token_s = now

    async def _end(self, body: bytes) -> None:
        """End the choice after `body`, which is not sent yet; the last one ends the response."""
        answer, exchange = self._answer, self._exchange
        answer.num_open -= 1
        body += await self._writer.end(self._run)
        if answer.num_open:
            if body:
                await exchange.write(body)
        elif self._plan.body.stream:
            await exchange.end_stream(body)
        else:
            await exchange.respond(200, body, answer.headers(answer.runs[0], exchange))

    async def _begin(self, delta: TokenDelta) -> bytes:
        """Note the first delta of a worker, which begins the choice or resumes it.

        Returns the bytes to send before those of its tokens.
        """
        now = time.perf_counter()
        run, model = self._run, self._plan.head.model
        run.failover.begun()
        if run.generated:
            self._metrics.migration_gap.labels(model).observe(now - run.last_token_s)
            return b""
        run.last_token_s = now
        if run.has_begun:
            return b""
        run.prompt_logprobs = _checked(delta, run.choice)
        run.has_begun = True
        run.first_token_s = now
        run.began_with = run.failover.decision
        run.report = delta.prefill
        if run.choice.request.images and delta.num_prompt_tokens:
            num_sent = len(run.choice.prompt.token_ids)
            run.num_image_tokens = max(0, delta.num_prompt_tokens - num_sent)
        if delta.prefill is not None:
            self._metrics.prefills.add(model, delta.prefill.place)
            self._recent.began(run.instance_id, delta.prefill)
        if self._plan.body.stream and not self._exchange.has_events:
            await self._exchange.start_stream(self._answer.headers(run, self._exchange))
        return await self._writer.begin(run)


def _checked(delta: TokenDelta, choice: Choice) -> PromptLogprobs | None:
    """Return the log probabilities of a choice's prompt. None when they are not wanted.

    Raises ProtocolError when they are not those of its tokens.
    """
    if not choice.request.sampling.prompt_logprobs:
        return None
    found = delta.prompt_logprobs
    if found is None or not found.are_of(len(choice.prompt.token_ids) - 1):
        raise ProtocolError("the worker sent no log probabilities of the prompt")
    return found


def resume_after(request: GenerateRequest, generated: list[int]) -> GenerateRequest:
    """Return `request` for a worker that resumes after the tokens already `generated`."""
    if not generated:
        return request
    return msgspec.structs.replace(
        request,
        token_ids=request.token_ids + pack_tokens(generated),
        sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=False),
        num_generated=len(generated),
    )
