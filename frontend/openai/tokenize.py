"""POST /tokenize and /detokenize, in the shapes of vLLM."""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from tandem.frontend.bodies.outline import MAX_PROMPT_TOKENS, Fields, read_fields
from tandem.frontend.bodies.typed import Body, read_body
from tandem.frontend.chat.requests import ChatRequest
from tandem.frontend.chat.sampling import MAX_TOKEN_ID
from tandem.frontend.errors import OpenAIErrors
from tandem.frontend.generation.plan import of_tokens
from tandem.frontend.generation.prompts import check_num_tokens
from tandem.frontend.http.api import Call, Work, respond
from tandem.frontend.shapes.generations import Generations

_encode = msgspec.json.Encoder().encode


class Tokenized(msgspec.Struct, frozen=True):
    """The tokens of a text; `token_strs` are their entries in the vocabulary."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class _TextBody(Body, frozen=True, kw_only=True):
    model: str
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class _ChatBody(ChatRequest, frozen=True, kw_only=True):
    return_token_strs: bool | None = None


class _TokensBody(Body, frozen=True, kw_only=True):
    model: str
    tokens: Annotated[
        list[Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]], Meta(max_length=MAX_PROMPT_TOKENS)
    ]


class TokenizeApi:
    """Texts to tokens, of a prompt or of a chat as its template renders it."""

    errors = OpenAIErrors()

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    async def prepare(self, raw: bytes, call: Call) -> Work:
        fields = _with_model(read_fields(raw), self._generations)
        if "messages" in fields:
            chat = self._generations.parse(_ChatBody, _encode(fields), call.ignored)
            wants_strings = chat.return_token_strs
            model = of_tokens(self._generations.model(chat.model, "chat", call))
            token_ids = await self._generations.prompt_maker.chat_tokens(chat, model)
        else:
            body = read_body(_TextBody, _encode(fields), ("prompt",), call.ignored)
            wants_strings = body.return_token_strs
            model = of_tokens(self._generations.model(body.model, "completions", call))
            token_ids = await self._generations.prompt_maker.text_tokens(
                body.prompt, model, with_special=body.add_special_tokens is not False
            )
        strings: list[str] | None = None
        if wants_strings:
            strings = await self._generations.prompt_maker.token_strings(token_ids, model)
        length = model.card.context_length
        return respond(Tokenized(len(token_ids), length, token_ids, strings), call)


class DetokenizeApi:
    """Tokens to text, special tokens included."""

    errors = OpenAIErrors()

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    async def prepare(self, raw: bytes, call: Call) -> Work:
        fields = _with_model(read_fields(raw), self._generations)
        if "tokens" in fields:  # before any object is made of them
            num_tokens = bytes(fields["tokens"]).count(b",") + 1
            check_num_tokens(num_tokens, self._generations.longest_context)
        body = read_body(_TokensBody, _encode(fields), ("tokens",), call.ignored)
        model = of_tokens(self._generations.model(body.model, "completions", call))
        text = await self._generations.prompt_maker.text_of(body.tokens, model)
        return respond({"prompt": text}, call)


def _with_model(fields: Fields, generations: Generations) -> Fields:
    """Return the fields of a body, with a `model` where one is served alone and none is named."""
    name = generations.only_model
    if "model" in fields or name is None:
        return fields
    return fields | {"model": Raw(_encode(name))}
