"""From a body that an API has checked to the generation of its answer."""

from collections.abc import Callable

from tandem.frontend.api import Call, Work
from tandem.frontend.catalog.catalog import ServedModel
from tandem.frontend.deps import FrontendDeps
from tandem.frontend.generation.generation import Answer, Sink, generate, new_answer
from tandem.frontend.generation.plan import default_sampling, most_tokens, new_plan
from tandem.frontend.generation.prompts import PromptMaker
from tandem.frontend.http.exchange import Exchange
from tandem.frontend.openai.requests import Body, ChatRequest, CompletionRequest, parse
from tandem.frontend.text.body import Route, TextBody, model_named_in
from tandem.frontend.text.generation import NewWriter, TextGeneration
from tandem.runtime.sampling_defaults import NO_DEFAULTS, SamplingDefaults

NewSink = Callable[[Answer, Exchange], Sink]


class Generations:
    """Finds the model of a body, and plans its answer."""

    def __init__(self, deps: FrontendDeps) -> None:
        self.prompt_maker = PromptMaker(deps.config, deps.executor)
        self._deps = deps

    def parse(self, kind: type[Body], raw: bytes) -> Body:
        """Return the checked request in `raw`. Raises InvalidRequestError naming the field."""
        return parse(kind, raw, self._deps.config, self._deps.catalog.longest_context)

    @property
    def only_model(self) -> str | None:
        """The name of the model, where one is served alone."""
        models = self._deps.catalog.models
        return models[0].card.name if len(models) == 1 else None

    def default_sampling(self, name: str) -> SamplingDefaults:
        """Return the sampling of requests to the model of this name that name none."""
        models = {model.card.name: model for model in self._deps.catalog.models}
        model = models.get(name)
        return NO_DEFAULTS if model is None else default_sampling(model, self._deps.config)

    def is_for_text_model(self, raw: bytes) -> bool:
        """Return True if a body names a model that reads and writes text itself."""
        catalog = self._deps.catalog
        if not catalog.has_text_models:
            return False
        name = model_named_in(raw)
        return name is not None and catalog.reads_text(name)

    async def of_tokens(
        self, body: ChatRequest | CompletionRequest, new_sink: NewSink, call: Call
    ) -> Work:
        """Return the generation of a body for a model whose text is the frontend's."""
        route: Route = "chat" if isinstance(body, ChatRequest) else "completions"
        model = self.model(body.model, route, call)
        plan = await new_plan(body, model, self.prompt_maker, call.context, call.exchange.headers)
        if call.exchange.client is not None:
            num_tokens = most_tokens(plan)
            call.exchange.client.reserve(num_tokens)
            call.num_reserved = num_tokens
        answer = new_answer(plan, self._deps)
        call.record.summarize = answer.summary
        return generate(answer, new_sink(answer, call.exchange), call.exchange, self._deps)

    def of_text(self, body: TextBody, new_writer: NewWriter, call: Call) -> Work:
        """Return the generation of a body for a model that reads and writes text."""
        model = self.model(body.model, body.route, call)
        text = TextGeneration(body, new_writer, model, call.context, call.exchange, self._deps)
        call.record.summarize = text.summary
        return text.run()

    def model(self, name: str, route: Route, call: Call) -> ServedModel:
        """Return the model, which is served on this route. Counts the request for the model."""
        model = self._deps.catalog.get(name)
        call.record.model = name
        self._deps.metrics.inflight.add(name)
        model.check_route(route)
        return model
