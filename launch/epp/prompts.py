"""The prompts of requests that pass a Gateway, read as a frontend will read them."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.frontend.access.access import Access
from tandem.frontend.anthropic.api import MessagesApi
from tandem.frontend.catalog.catalog import TokenModel
from tandem.frontend.chat.requests import ChatRequest, CompletionRequest
from tandem.frontend.chat.text_body import Route
from tandem.frontend.config import FrontendConfig
from tandem.frontend.generation.deps import FrontendDeps
from tandem.frontend.generation.plan import of_tokens, targets_in
from tandem.frontend.http.api import Api, Call, Work
from tandem.frontend.http.exchange import CONNECTION, Exchange
from tandem.frontend.openai.api import OpenAIApi
from tandem.frontend.responses.api import ResponsesApi
from tandem.frontend.responses.shared import SharedResponses
from tandem.frontend.responses.store import ResponseStore
from tandem.frontend.shapes.generations import Generations
from tandem.frontend.telemetry.request_log import RequestRecord
from tandem.runtime.context import RequestContext


class ReadPrompt(msgspec.Struct, frozen=True):
    """The first prompt of a body."""

    model: TokenModel
    token_ids: list[int]
    salt: str  # of its blocks
    is_hashable: bool  # False where its tokens do not name it, as those of images
    ttft_target_s: float | None


class _Reading(Call):
    prompt: ReadPrompt | None = None


class Prompts:
    """The APIs of a frontend, up to the tokens of a prompt."""

    def __init__(self, deps: FrontendDeps, access: Access) -> None:
        generations = _PromptsOnly(deps)
        config: FrontendConfig = deps.config
        nothing_stored = SharedResponses(ResponseStore(0, 0))
        self._access = access
        self._apis: Mapping[str, Api] = {
            "/v1/chat/completions": OpenAIApi(ChatRequest, "chat", generations),
            "/v1/completions": OpenAIApi(CompletionRequest, "completions", generations),
            "/v1/responses": ResponsesApi(generations, nothing_stored, config.max_body_bytes),
            "/v1/messages": MessagesApi(generations),
        }

    async def read(self, head: dict[bytes, bytes], body: bytes) -> ReadPrompt | None:
        """Return the prompt of a request; None where its worker makes no difference.

        Raises the TandemError with which a frontend will answer.
        """
        path = head.get(b":path", b"").decode("latin-1").partition("?")[0].rstrip("/")
        api = self._apis.get(path)
        if api is None or head.get(b":method") != b"POST":
            return None
        scope = {"headers": head.items(), CONNECTION: None}
        exchange = Exchange(scope, _unused, _unused, api.errors)
        exchange.client = self._access.client("POST", path, head)
        exchange.check_is_json()
        async with RequestContext() as context:
            call = _Reading(exchange, context, RequestRecord(context.id, path))
            await (await api.prepare(body, call))
        return call.prompt


class _PromptsOnly(Generations):
    """Generations that end with the prompt: in its call."""

    async def of_tokens(
        self, body: ChatRequest | CompletionRequest, new_writer: object, call: Call
    ) -> Work:
        assert isinstance(call, _Reading)
        route: Route = "chat" if isinstance(body, ChatRequest) else "completions"
        model = of_tokens(self.model(body.model, route, call))
        [prompt, *_] = await self.prompt_maker.prompts(body, model, clamps=True)
        targets = targets_in(call.exchange.headers)
        ttft_ms = None if targets is None else targets.ttft_ms
        call.prompt = ReadPrompt(
            model,
            prompt.token_ids,
            body.cache_salt or "",
            not (isinstance(body, ChatRequest) and body.images),
            None if ttft_ms is None else ttft_ms / 1e3,
        )
        return _nothing()

    def of_text(self, *_: object) -> Work:
        """Leave it to the frontend: the worker reads the text."""
        return _nothing()


async def _nothing() -> None:
    pass


async def _unused(*_: object) -> Any:
    raise AssertionError("a prompt is read without an answer")
