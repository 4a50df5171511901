"""From the texts of a body to the tokens of its prompts, without holding up the streams."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.catalog.catalog import TokenModel
from tandem.frontend.chat.messages import TemplateMessage
from tandem.frontend.chat.requests import ChatRequest, CompletionRequest
from tandem.frontend.config import FrontendConfig
from tandem.frontend.tokens.template import TemplateTimeError
from tandem.runtime.errors import ContextLengthError, InvalidRequestError, OverloadedError
from tandem.runtime.wire.messages import StopConditions

T = TypeVar("T")

# Less than this takes less time than a thread takes to answer.
INLINE_CHARACTERS = 4096
_INLINE_TOKENS = 1024
_INLINE_RENDER_S = 0.01
_RENDER_S = 2.0  # of CPU time; an honest template takes milliseconds
_THREAD_WAIT_S = 30.0
_MAX_ARGUMENT_VALUES = 2**18  # of all calls of a chat: their JSON is read on the event loop, 50 ms


class Prompt(msgspec.Struct, frozen=True):
    """One prompt; `echo` is its text where the answer repeats it, `stop` the end of its answer."""

    token_ids: list[int]
    echo: str
    stop: StopConditions
    has_echoed_logprobs: bool = False


class PromptMaker:
    """Renders and tokenizes. Long texts go to the threads of their model, one by one."""

    def __init__(self, config: FrontendConfig) -> None:
        self.config = config

    async def prompts(
        self, body: ChatRequest | CompletionRequest, model: TokenModel, *, clamps: bool
    ) -> list[Prompt]:
        """Return the prompts of a body, each checked as it is made. Raises InvalidRequestError.

        With `clamps` an answer may be as long as the context allows, and its limit may be larger.
        """
        if isinstance(body, ChatRequest):
            return [await self._chat_prompt(body, model, clamps)]
        given = body.prompts(self.config)
        num_characters = sum([len(each) for each in given if type(each) is str])
        is_short = num_characters <= INLINE_CHARACTERS
        return [
            await self._completion_prompt(each, body, model, is_short, clamps) for each in given
        ]

    async def chat_tokens(self, body: ChatRequest, model: TokenModel) -> list[int]:
        """Return the tokens of a chat's prompt. Raises InvalidRequestError."""
        text = await self._render(body, model)
        where = body.origins.prompt
        check_characters(text, model, where)
        is_short = len(text) <= INLINE_CHARACTERS
        is_chat = not body.add_special_tokens  # its template has them
        token_ids = await self._encode(text, model, is_short, is_chat=is_chat, param=where)
        token_ids = truncated(token_ids, body, model)
        if not token_ids:
            raise InvalidRequestError("the messages have no tokens", param=where)
        return token_ids

    async def text_tokens(self, text: str, model: TokenModel, *, with_special: bool) -> list[int]:
        """Return the tokens of a text. Raises InvalidRequestError."""
        check_characters(text, model, "prompt")
        is_short = len(text) <= INLINE_CHARACTERS
        return await self._encode(text, model, is_short, is_chat=not with_special)

    async def text_of(self, token_ids: list[int], model: TokenModel) -> str:
        """Return the text of tokens, special tokens included.

        Raises InvalidRequestError for more of them than the model's context has.
        """
        check_token_ids(token_ids, model, "tokens")
        check_num_tokens(len(token_ids), model.card.context_length)
        return await in_thread(model, lambda: model.text.decode(token_ids))

    async def token_strings(self, token_ids: list[int], model: TokenModel) -> list[str]:
        """Return the entries of tokens in the vocabulary."""
        return await in_thread(model, lambda: model.text.token_strings(token_ids))

    async def _chat_prompt(self, body: ChatRequest, model: TokenModel, clamps: bool) -> Prompt:
        token_ids = await self.chat_tokens(body, model)
        stop = stop_conditions(body, model, len(token_ids), clamps=clamps)
        return Prompt(token_ids, "", stop)

    async def _render(self, body: ChatRequest, model: TokenModel) -> str:
        _check_arguments(body)
        rules = model.card.answers
        messages = body.conversation()
        extra = body.template_variables(shows_unused_tools=rules.shows_unused_tools)
        adds_prompt = body.add_generation_prompt is not False and not body.continue_final_message

        def render(limit_s: float) -> str:
            try:
                return model.text.render(
                    messages,
                    extra,
                    model.max_characters,
                    limit_s,
                    add_generation_prompt=adds_prompt,
                    continues_last=bool(body.continue_final_message),
                )
            except InvalidRequestError as error:
                raise body.origins.named(error) from error.__cause__

        num_characters = sum(map(_num_characters, messages))
        if num_characters <= INLINE_CHARACTERS:
            try:
                return render(_INLINE_RENDER_S)
            except TemplateTimeError:
                pass
        return await in_thread(model, lambda: render(_RENDER_S))

    async def _completion_prompt(
        self,
        prompt: str | list[int],
        body: CompletionRequest,
        model: TokenModel,
        is_short: bool,
        clamps: bool,
    ) -> Prompt:
        if isinstance(prompt, list):
            check_token_ids(prompt, model, "prompt")
            prompt = truncated(prompt, body, model)
            stop = stop_conditions(body, model, len(prompt), clamps=clamps)
            echo = await self._echo(prompt, model) if body.echo else ""
            return Prompt(prompt, echo, stop, body.echoes_logprobs)
        check_characters(prompt, model, "prompt")
        is_bare = body.add_special_tokens is False
        token_ids = await self._encode(prompt, model, is_short, is_chat=is_bare)
        if not token_ids and model.text.start_token_id is not None:
            token_ids = [model.text.start_token_id]
        if not token_ids:
            raise invalid_field("prompt", "has no tokens")
        kept = truncated(token_ids, body, model)
        if len(kept) < len(token_ids) and body.echo:
            prompt = await self._echo(kept, model)
        stop = stop_conditions(body, model, len(kept), clamps=clamps)
        return Prompt(kept, prompt if body.echo else "", stop, body.echoes_logprobs)

    async def _echo(self, token_ids: list[int], model: TokenModel) -> str:
        decode = model.text.detokenizers.decode
        if len(token_ids) <= _INLINE_TOKENS:
            return decode(token_ids)
        return await in_thread(model, lambda: decode(token_ids))

    async def _encode(
        self,
        text: str,
        model: TokenModel,
        is_short: bool,
        *,
        is_chat: bool,
        param: str = "prompt",
    ) -> list[int]:
        def encode() -> list[int]:
            return model.text.encode(text, is_chat=is_chat, param=param)

        return encode() if is_short and model.text.is_quick else await in_thread(model, encode)


def _check_arguments(body: ChatRequest) -> None:
    """Raise InvalidRequestError for calls with more values than can be read at once."""
    num_values = 0
    for index, message in enumerate(body.messages):
        for call in message.tool_calls or ():
            arguments = call.function.arguments or ""
            num_values += sum(map(arguments.count, ",[{"))
        if num_values > _MAX_ARGUMENT_VALUES:
            is_older = message.function_call is not None
            raise invalid_field(
                f"messages[{index}].function_call" if is_older else body.origins.calls(index),
                f"and those before have over {_MAX_ARGUMENT_VALUES} values in their arguments",
            )


def _num_characters(message: TemplateMessage) -> int:
    """Return the characters of a message's content and calls, which take time to render."""
    calls, content = message.get("tool_calls", ()), message["content"]
    texts = content if isinstance(content, str) else "".join([p.get("text", "") for p in content])
    return len(texts) + sum(len(call["function"]["arguments"]) for call in calls)


def check_characters(text: str, model: TokenModel, param: str) -> None:
    """Raise ContextLengthError for a text that cannot fit, however few tokens it has."""
    if len(text) > model.max_characters:
        raise ContextLengthError(
            f"the model's context is {model.card.context_length} tokens of at most "
            f"{model.text.longest_token} characters; the prompt has more than "
            f"{model.max_characters} characters",
            param=param,
        )


def truncated(
    token_ids: list[int], body: ChatRequest | CompletionRequest, model: TokenModel
) -> list[int]:
    """Return the last tokens of a prompt, as many as the body wants; -1 is all that fit."""
    most = body.truncate_prompt_tokens
    if most is None:
        return token_ids
    if most == -1:
        limit = 1 if body.token_limit is None else body.token_limit
        limit = limit if limit < model.card.context_length else 1
        most = max(1, model.card.context_length - limit)
    return token_ids[-most:]


def stop_conditions(
    body: ChatRequest | CompletionRequest,
    model: TokenModel,
    num_prompt_tokens: int,
    *,
    clamps: bool,
) -> StopConditions:
    """Return the end of an answer. Raises InvalidRequestError if it does not fit the context."""
    context_length = model.card.context_length
    limit = body.token_limit
    num_left = context_length - num_prompt_tokens
    if clamps and limit is not None and num_left > 0:
        limit = min(limit, num_left)
    if num_left < (1 if limit is None else limit):
        asked = "" if limit is None else f" and {limit} for the answer"
        raise ContextLengthError(
            f"the model's context is {context_length} tokens; this request has "
            f"{num_prompt_tokens} in the prompt{asked}",
            param=body.origins.prompt if num_left < 1 else body.origins.max_tokens,
        )
    max_tokens = num_left if limit is None else limit
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid_field(
            "min_tokens", f"is {min_tokens}, more than the {max_tokens} tokens of the answer"
        )
    stop_token_ids = body.stop_token_ids or []
    if stop_token_ids:
        check_token_ids(stop_token_ids, model, "stop_token_ids")
    return StopConditions(max_tokens, min_tokens, stop_token_ids, bool(body.ignore_eos))


def check_num_tokens(num_tokens: int, context_length: int) -> None:
    """Raise ContextLengthError for more `tokens` than a context has."""
    if num_tokens > context_length:
        raise ContextLengthError(
            f"`tokens` has {num_tokens} entries; the model's context is {context_length} tokens",
            param="tokens",
        )


def check_token_ids(token_ids: list[int] | dict[int, float], model: TokenModel, param: str) -> None:
    """Raise InvalidRequestError for a token beyond the vocabulary."""
    if token_ids and max(token_ids) >= model.card.vocab_size:
        raise invalid_field(
            param,
            f"has token {max(token_ids)}; the model's vocabulary ends at "
            f"{model.card.vocab_size - 1}",
        )


async def in_thread(model: TokenModel, work: Callable[[], T]) -> T:
    """Return the result of `work`. Raises OverloadedError when no thread gets it done."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_THREAD_WAIT_S):
            return await loop.run_in_executor(model.text.threads, work)
    except TimeoutError:
        raise OverloadedError(
            f"the frontend's tokenizer threads of model {model.card.name!r} are busy"
        ) from None
