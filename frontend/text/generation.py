"""A request for a model that reads and writes text itself: passed on, its answer passed back."""

import time
from abc import ABC, abstractmethod

from tandem.frontend.catalog import ServedModel
from tandem.frontend.exchange import Exchange, Header
from tandem.frontend.generation import Services
from tandem.frontend.migration import MIGRATABLE, Attempts, is_worker_at_fault
from tandem.frontend.openai.sse import DONE, StreamHead
from tandem.frontend.text.answers import Answer, StreamedText, WholeText, read_answer
from tandem.frontend.text.body import TextBody
from tandem.runtime.context import RequestContext
from tandem.runtime.discovery import endpoint_of
from tandem.runtime.errors import (
    ConnectionLostError,
    ProtocolError,
    TandemError,
    UnavailableError,
)
from tandem.runtime.messages import TextRequest, encode
from tandem.runtime.plane.client import ResponseStream

_BYTES_PER_TOKEN = 4  # of English text; the router wants to know how heavy a request is


class TextGeneration(ABC):
    """One request; subclasses say what becomes of the answers.

    A worker that fails is replaced by another until the client has been sent something.
    """

    def __init__(
        self,
        body: TextBody,
        model: ServedModel,
        context: RequestContext,
        exchange: Exchange,
        services: Services,
    ) -> None:
        self.body = body
        self.model = model
        self.context = context
        self.exchange = exchange
        self.services = services
        self.instance_id = ""  # that was asked last
        self.first_answer_s = 0.0  # perf_counter; 0 before it
        kind = "chatcmpl-" if body.route == "chat" else "cmpl-"
        self.head = StreamHead(
            kind + context.id,
            int(time.time()),
            body.model,
            body.route == "chat",
            body.include_usage,
        )

    @abstractmethod
    def begin(self) -> None:
        """A worker is about to answer; what another one said is forgotten."""

    @abstractmethod
    async def on_answers(self, answers: list[Answer]) -> None:
        """What has come from the worker."""

    @abstractmethod
    async def on_end(self) -> None:
        """The worker has said everything."""

    async def run(self) -> None:
        """Answer. Raises the error of the last worker that was tried."""
        limit = self.model.card.migration_limit
        attempts = Attempts(self.services.config.migration_limit if limit is None else limit)
        while True:
            self.instance_id = self._route(attempts)
            try:
                await self._attempt()
                return
            except MIGRATABLE as error:
                self._note_failure(attempts, error)
                if self.exchange.is_started:
                    raise
                if not attempts.has_more or not self._candidates(attempts):
                    raise self._nobody_left(error) from error
            attempts.num_migrations += 1
            metrics = self.services.metrics
            metrics.count(metrics.migrations, self.body.model, "new_request")

    def headers(self) -> list[Header]:
        """Who answers."""
        own = self.exchange.id_headers(self.context.id)
        return [(b"x-tandem-decode-instance", self.instance_id.encode()), *own]

    def _route(self, attempts: Attempts) -> str:
        candidates = self._candidates(attempts)
        if not candidates:
            raise UnavailableError(f"no worker serves {self.body.model!r} now")
        block_size = self.model.card.block_size
        num_blocks = 1 + len(self.body.raw) // (_BYTES_PER_TOKEN * block_size)
        decision = self.services.router.choose(candidates, [], num_blocks)
        self.services.router.started(self.context.id, decision, num_blocks)
        return decision.instance_id

    def _candidates(self, attempts: Attempts) -> list[str]:
        return attempts.eligible(self.services.catalog.candidates(self.model))

    def _note_failure(self, attempts: Attempts, error: TandemError) -> None:
        attempts.failed(self.instance_id, error)
        if is_worker_at_fault(error):
            self.services.catalog.exclude(self.instance_id, self.services.config.exclude_s)

    def _nobody_left(self, error: TandemError) -> TandemError:
        if not self.first_answer_s and isinstance(error, ConnectionLostError):
            return UnavailableError(f"no worker of {self.body.model!r} answers now")
        return error

    async def _attempt(self) -> None:
        try:
            stream = await self._open()
            try:
                await self._follow(stream)
            finally:
                stream.cancel()
        finally:
            self.services.router.finished(self.context.id)

    async def _follow(self, stream: ResponseStream) -> None:
        self.begin()
        num_answers = 0
        while True:
            try:
                items = await stream.take()
            except StopAsyncIteration:
                break
            if not num_answers:
                self.first_answer_s = self.first_answer_s or time.perf_counter()
                self.services.router.prefilled(self.context.id)
            num_answers += len(items)
            answers = [read_answer(item, self.head) for item in items]
            await self.on_answers(answers)
        if not num_answers:
            raise ProtocolError("the worker ended without an answer")
        await self.on_end()

    async def _open(self) -> ResponseStream:
        instance = self.services.catalog.instance(self.model, self.instance_id)
        if instance is None:
            raise ConnectionLostError(f"instance {self.instance_id} has left")
        request = TextRequest(
            request_id=self.context.id,
            model=self.body.model,
            kind=self.body.route,
            body=self.body.raw,
            deadline_ms=int(self.context.remaining_s() * 1e3),
        )
        return await self.services.client.open(
            instance.address, endpoint_of(instance), encode(request), self.context
        )


class StreamedTextGeneration(TextGeneration):
    """Answers by server-sent events."""

    def begin(self) -> None:
        self._text = StreamedText(self.head)

    async def on_answers(self, answers: list[Answer]) -> None:
        events = b"".join(map(self._text.event, answers))
        if not self.exchange.is_started:
            await self.exchange.start_stream(self.headers())
        await self.exchange.write(events)

    async def on_end(self) -> None:
        await self.exchange.end_stream(self._text.end() + DONE)


class WholeTextGeneration(TextGeneration):
    """Answers once, when the worker has said everything."""

    def begin(self) -> None:
        self._text = WholeText(self.head)

    async def on_answers(self, answers: list[Answer]) -> None:
        for answer in answers:
            self._text.add(answer)

    async def on_end(self) -> None:
        await self.exchange.respond(200, self._text.body(), self.headers())


def text_generation(
    body: TextBody,
    model: ServedModel,
    context: RequestContext,
    exchange: Exchange,
    services: Services,
) -> TextGeneration:
    """The generation that answers as the body asks: in a stream, or whole."""
    kind = StreamedTextGeneration if body.stream else WholeTextGeneration
    return kind(body, model, context, exchange, services)
