"""From a body that an API has checked to the generation of its answer."""

import asyncio
from collections.abc import Callable

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.images import Images
from tandem.frontend.catalog.catalog import ModelRoute, ServedModel
from tandem.frontend.chat.requests import Body, ChatRequest, CompletionRequest, parse
from tandem.frontend.chat.text_body import Route, TextBody, model_named_in
from tandem.frontend.config import FrontendConfig
from tandem.frontend.generation.deps import FrontendDeps
from tandem.frontend.generation.generation import Answer, AnswerWriter, generate, new_answer
from tandem.frontend.generation.plan import default_sampling, most_generated, new_plan
from tandem.frontend.generation.prompts import PromptMaker
from tandem.frontend.http.api import Call, Work
from tandem.frontend.text.generation import NewWriter, TextGeneration
from tandem.runtime.wire.sampling_defaults import NO_DEFAULTS, SamplingDefaults

NewAnswerWriter = Callable[[Answer], AnswerWriter]


class Generations:
    """Finds the model of a body, and plans its answer."""

    def __init__(self, deps: FrontendDeps) -> None:
        self.prompt_maker = PromptMaker(deps.config)
        self._deps = deps

    @property
    def config(self) -> FrontendConfig:
        """The frontend's."""
        return self._deps.config

    def parse(self, kind: type[Body], raw: bytes, ignored: Ignored) -> Body:
        """Return the checked request in `raw`. Raises InvalidRequestError naming the field."""
        return parse(kind, raw, self.config, self.longest_context, ignored, self.images)

    def images(self, name: str) -> Images | None:
        """Return the images of a new request to the model of this name; None if it sees none."""
        return Images(self.config) if self._deps.catalog.sees_images(name) else None

    @property
    def longest_context(self) -> int:
        """The most tokens of a prompt that any model takes."""
        return self._deps.catalog.longest_context

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

    def serves(self, name: str, route: ModelRoute) -> bool:
        """Return True if a model of this name is served on the route."""
        models = self._deps.catalog.models
        return any(each.card.name == name and route in each.card.model_types for each in models)

    def is_for_text_model(self, raw: bytes) -> bool:
        """Return True if a body names a model that reads and writes text itself."""
        if not self._deps.catalog.has_text_models:
            return False
        name = model_named_in(raw)
        return name is not None and self.reads_text(name)

    def reads_text(self, name: str) -> bool:
        """Return True for the name of a model that reads and writes text itself."""
        return self._deps.catalog.reads_text(name)

    async def of_tokens(
        self, body: ChatRequest | CompletionRequest, new_writer: NewAnswerWriter, call: Call
    ) -> Work:
        """Return the generation of a body for a model whose text is the frontend's."""
        route: Route = "chat" if isinstance(body, ChatRequest) else "completions"
        model = self.model(body.model, route, call)
        plan = await new_plan(body, model, self.prompt_maker, call)
        if call.exchange.client is not None:
            call.charge = call.exchange.client.charge(plan.num_prompt_tokens, most_generated(plan))
        call.keeps_body = bool(plan.choices[0].request.images)
        named = self._deps.named_workers.named_in(call.exchange.headers)
        answer = new_answer(plan, self._deps, call.owner, named)
        call.record.summarize = answer.summary
        work = generate(answer, new_writer(answer), call.exchange, self._deps)
        return self._with_comments(work, call) if body.stream else work

    def of_text(self, body: TextBody, new_writer: NewWriter, call: Call) -> Work:
        """Return the generation of a body for a model that reads and writes text."""
        model = self.model(body.model, body.route, call)
        text = TextGeneration(body, new_writer, model, call.context, call.exchange, self._deps)
        call.record.summarize = text.summary
        return self._with_comments(text.run(), call) if body.stream else text.run()

    async def _with_comments(self, work: Work, call: Call) -> None:
        """Do the work of a stream, with comments up to its first event where they are on."""
        interval_s = self._deps.config.comment_interval_s
        if not interval_s:
            await work
            return
        exchange = call.exchange
        headers = exchange.id_headers(call.context.id)
        comments = asyncio.create_task(exchange.comment_until_events(interval_s, headers))
        try:
            await work
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)

    def model(self, name: str, route: ModelRoute, call: Call) -> ServedModel:
        """Return the model, which is served on this route. Counts the request for the model."""
        model = self._deps.catalog.get(name)
        call.record.model = name
        self._deps.metrics.inflight.add(name)
        model.check_route(route)
        return model
