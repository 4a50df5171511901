"""A request for a model that reads and writes text itself: body and answers are passed through."""

import time
from collections.abc import Callable

from tandem.frontend.access.limits import Header
from tandem.frontend.catalog.catalog import ServedModel
from tandem.frontend.chat.responses import ResponseHead, new_head
from tandem.frontend.chat.text_body import TextBody
from tandem.frontend.generation.deps import FrontendDeps
from tandem.frontend.generation.failover import Failover, decision_headers
from tandem.frontend.http.exchange import Exchange
from tandem.frontend.telemetry.request_log import AnswerSummary
from tandem.frontend.text.answers import TextWriter, read_answer
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ProtocolError, TandemError
from tandem.runtime.plane.response_stream import ResponseStream
from tandem.runtime.wire.messages import TextRequest, encode

NewWriter = Callable[[ResponseHead], TextWriter]
_BYTES_PER_TOKEN = 4  # of English text; the router weighs requests by their blocks


class TextGeneration:
    """One request. Another worker may replace one that fails until the client was sent something.

    It is the `WorkerSequence` of its failover.
    """

    num_generated = 0  # the next worker begins anew

    def __init__(
        self,
        body: TextBody,
        new_writer: NewWriter,
        model: ServedModel,
        context: RequestContext,
        exchange: Exchange,
        deps: FrontendDeps,
    ) -> None:
        self._first_s = 0.0  # perf_counter at the first answer; 0 before it
        self._body = body
        self._new_writer = new_writer
        self._block_size = model.card.block_size
        self._context = context
        self._exchange = exchange
        self._failover = Failover(context.id, model, context, deps, exchange.owner)
        self._head = new_head(context.id, body.model, body.route == "chat", body.include_usage)

    async def run(self) -> None:
        """Answer. Raises the error of the last worker that was tried."""
        await self._failover.run(self)

    def summary(self) -> AnswerSummary:
        """Return the facts for the log; the worker counts the tokens itself."""
        choice = self._failover.decision
        return AnswerSummary(self._first_s, choice.instance_id, None, None, choice.reason)

    @property
    def ttft_target_s(self) -> None:
        return None

    def blocks(self, with_hashes: bool) -> tuple[int, list[bytes]]:
        return 1 + len(self._body.raw) // (_BYTES_PER_TOKEN * self._block_size), []

    def payload(self) -> bytes:
        return encode(
            TextRequest(
                request_id=self._context.id,
                model=self._body.model,
                kind=self._body.route,
                body=self._body.raw,
                deadline_ms=int(self._context.remaining_s() * 1e3),
            )
        )

    async def follow(self, stream: ResponseStream) -> None:
        writer = self._new_writer(self._head)
        try:
            await self._pass_on(stream, writer)
        finally:
            stream.cancel()
        if self._body.stream:
            await self._exchange.end_stream(writer.end())
        else:
            await self._exchange.respond(200, writer.end(), self._headers())

    async def settle(self, error: TandemError) -> bool:
        if self._exchange.has_events:
            raise error
        return False

    async def _pass_on(self, stream: ResponseStream, writer: TextWriter) -> None:
        """Take all answers of a worker. Raises ProtocolError when there is none."""
        has_begun = False
        while True:
            try:
                items = await stream.take()
            except StopAsyncIteration:
                break
            if not has_begun:
                has_begun = True
                self._first_s = self._first_s or time.perf_counter()
                self._failover.begun()
            events = b"".join([writer.add(read_answer(item, self._head)) for item in items])
            if events:
                if not self._exchange.has_events:
                    await self._exchange.start_stream(self._headers())
                await self._exchange.write(events)
        if not has_begun:
            raise ProtocolError("the worker ended without an answer")

    def _headers(self) -> list[Header]:
        headers = decision_headers(self._failover.decision)
        return headers + self._exchange.id_headers(self._context.id)
