"""The life of an HTTP request: body, plan, generation, and one line about it in the log."""

import asyncio
import logging
import time
from concurrent.futures import Executor
from dataclasses import dataclass, field

from tandem.frontend.catalog import ServedModel
from tandem.frontend.exchange import ClientGoneError, Exchange
from tandem.frontend.generation import Generation, Services
from tandem.frontend.openai.requests import ChatRequest, CompletionRequest, parse
from tandem.frontend.openai.responses import error_body, public_error
from tandem.frontend.openai.sse import error_event
from tandem.frontend.plan import Planner
from tandem.frontend.sinks import StreamedGeneration, WholeGeneration
from tandem.frontend.text.body import Route, model_named_in, parse_text
from tandem.frontend.text.generation import TextGeneration, text_generation
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import CancelledRequestError, UnavailableError

logger = logging.getLogger(__name__)

_MAX_TRACE_CHARACTERS = 512
_CLIENT_CLOSED_REQUEST = 499


@dataclass(slots=True)
class _Record:
    """What is said of a request when it is over."""

    endpoint: str
    arrived_s: float = field(default_factory=time.perf_counter)
    model: str = ""  # once it is known to exist
    generation: Generation | TextGeneration | None = None
    error: str = ""


class Service:
    """Answers chat and completions requests; `is_draining` refuses new ones."""

    def __init__(self, services: Services, executor: Executor) -> None:
        self._services = services
        self._planner = Planner(services.config, executor)
        self._contexts: set[RequestContext] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    async def handle(
        self, exchange: Exchange, kind: type[ChatRequest] | type[CompletionRequest], endpoint: str
    ) -> None:
        """Answer one request, whatever happens."""
        record = _Record(endpoint)
        context = RequestContext(
            timeout_s=self._services.config.request_timeout_s, headers=_trace(exchange)
        )
        self._contexts.add(context)
        self._idle.clear()
        try:
            await self._answer(exchange, kind, context, record)
        except ClientGoneError:
            exchange.is_gone = True
        except asyncio.CancelledError:
            context.cancel("the frontend stopped")
            raise
        except Exception as error:
            context.cancel("the request failed")
            await self._fail(exchange, error, record, context)
        finally:
            context.close()
            self._contexts.discard(context)
            if not self._contexts:
                self._idle.set()
            self._note(exchange, record, context)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests; wait for those under way, then cancel what is left."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("cancelling %d requests after %g s", len(self._contexts), timeout_s)
            for context in list(self._contexts):
                context.cancel("the frontend is stopping")

    async def _answer(
        self,
        exchange: Exchange,
        kind: type[ChatRequest] | type[CompletionRequest],
        context: RequestContext,
        record: _Record,
    ) -> None:
        if self.is_draining:
            raise UnavailableError("this frontend is shutting down")
        config = self._services.config
        raw = await exchange.read_body(config.max_body_bytes, config.body_timeout_s)
        route: Route = "chat" if kind is ChatRequest else "completions"
        generation: Generation | TextGeneration
        if self._is_for_text_model(raw):
            body = parse_text(route, raw)
            model = self._model(body.model, route, record)
            generation = text_generation(body, model, context, exchange, self._services)
        else:
            request = parse(kind, raw, config)
            model = self._model(request.model, route, record)
            plan = await self._planner.plan(request, model, context, exchange.headers)
            answer = StreamedGeneration if request.stream else WholeGeneration
            generation = answer(plan, exchange, self._services)
        record.generation = generation
        watcher = asyncio.get_running_loop().create_task(exchange.cancel_when_gone(context))
        await generation.run()
        del watcher  # it ends with the response; the loop holds it until then

    def _is_for_text_model(self, raw: bytes) -> bool:
        catalog = self._services.catalog
        if not catalog.has_text_models:
            return False
        name = model_named_in(raw)
        return name is not None and catalog.reads_text(name)

    def _model(self, name: str, route: Route, record: _Record) -> ServedModel:
        """The model, which is served on this route; from here on the request counts for it."""
        model = self._services.catalog.get(name)
        record.model = name
        self._services.metrics.add_inflight(name, 1)
        model.check_route(route)
        return model

    async def _fail(
        self, exchange: Exchange, error: Exception, record: _Record, context: RequestContext
    ) -> None:
        if exchange.is_gone or exchange.is_over:
            if not isinstance(error, CancelledRequestError):
                logger.error("request %s after its end", context.id, exc_info=error)
            return
        if isinstance(error, CancelledRequestError):
            error = UnavailableError("this frontend is shutting down")
        shown = public_error(error, context.id)
        record.error = str(error)
        if exchange.is_started:
            exchange.status = shown.status
            await exchange.end_stream(error_event(error_body(shown)))
        else:
            await exchange.respond_error(shown, exchange.id_headers(context.id))

    def _note(self, exchange: Exchange, record: _Record, context: RequestContext) -> None:
        metrics = self._services.metrics
        status = _CLIENT_CLOSED_REQUEST if exchange.is_gone else exchange.status
        duration_s = time.perf_counter() - record.arrived_s
        metrics.count(metrics.requests, record.model, record.endpoint, str(status))
        if record.model:
            metrics.add_inflight(record.model, -1)
            metrics.duration.of(record.model).observe(duration_s)
        if exchange.is_gone:
            metrics.count(metrics.disconnects, record.model)
        generation = record.generation
        if generation is None:
            logger.info(
                "request %s %s: %d in %.1f ms%s",
                context.id,
                record.endpoint,
                status,
                duration_s * 1e3,
                f": {record.error}" if record.error else "",
            )
        elif isinstance(generation, TextGeneration):
            self._note_text(generation, record, context, status, duration_s)
        else:
            self._note_generation(generation, record, context, status, duration_s)

    def _note_text(
        self,
        generation: TextGeneration,
        record: _Record,
        context: RequestContext,
        status: int,
        duration_s: float,
    ) -> None:
        ttft_s = generation.first_answer_s - record.arrived_s if generation.first_answer_s else None
        if ttft_s is not None:
            self._services.metrics.time_to_first_token.of(record.model).observe(ttft_s)
        logger.info(
            "request %s %s: %d in %.1f ms, first answer %s, text model at %s%s",
            context.id,
            record.endpoint,
            status,
            duration_s * 1e3,
            "none" if ttft_s is None else f"{ttft_s * 1e3:.1f} ms",
            generation.instance_id or "none",
            f": {record.error}" if record.error else "",
        )

    def _note_generation(
        self,
        generation: Generation,
        record: _Record,
        context: RequestContext,
        status: int,
        duration_s: float,
    ) -> None:
        metrics = self._services.metrics
        num_prompt_tokens = generation.plan.num_prompt_tokens
        metrics.input_tokens.of(record.model).observe(num_prompt_tokens)
        ttft_s = generation.first_token_s - record.arrived_s if generation.first_token_s else None
        if ttft_s is not None:
            metrics.time_to_first_token.of(record.model).observe(ttft_s)
            metrics.output_tokens.of(record.model).observe(generation.num_tokens)
            metrics.cached_tokens.of(record.model).observe(generation.num_cached_tokens)
        run = generation.runs[0]
        logger.info(
            "request %s %s: %d in %.1f ms, ttft %s, %d+%d tokens, %d cached, "
            "prefill %s at %s (%s)%s",
            context.id,
            record.endpoint,
            status,
            duration_s * 1e3,
            "none" if ttft_s is None else f"{ttft_s * 1e3:.1f} ms",
            num_prompt_tokens,
            generation.num_tokens,
            generation.num_cached_tokens,
            run.report.place if run.report else "none",
            run.instance_id or "none",
            run.report.reason if run.report else "",
            f": {record.error}" if record.error else "",
        )


def _trace(exchange: Exchange) -> dict[str, str]:
    """The W3C trace headers, which travel with the request."""
    trace = {}
    for name in ("traceparent", "tracestate"):
        value = exchange.headers.get(name.encode())
        if value is not None and len(value) <= _MAX_TRACE_CHARACTERS:
            trace[name] = value.decode("latin-1")
    return trace
