"""Text engines: OpenAI bodies to their requests, and their chunks to OpenAI chunks."""

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Set
from contextlib import aclosing
from typing import Any

from tandem.runtime.errors import InvalidRequestError
from tandem.sdk.engine.types import GenerateChunk, GenerateRequest
from tandem.sdk.wire.text_requests import text_chunk
from tandem.sdk.worker.context import Context

Answer = Callable[[GenerateRequest, Context], AsyncGenerator[GenerateChunk, None]]
TextAnswer = Callable[[dict[str, Any], Context], AsyncGenerator[dict[str, Any], None]]

_NO_EFFECT = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
)
_READ = frozenset(
    ("model", "messages", "prompt", "stream", "stream_options", "n", "echo", "stop", "logprobs",
     "top_logprobs", "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos")
)  # fmt: skip
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "seed",
)  # fmt: skip


def text_answers(answer: Answer, fields: Collection[str] = ()) -> TextAnswer:
    """Return an engine's `answer` for text: OpenAI bodies in, an OpenAI chunk per engine chunk out.

    `fields` of bodies are those that the engine reads beside the ones of all.
    """

    async def answer_body(
        body: dict[str, Any], context: Context
    ) -> AsyncGenerator[dict[str, Any], None]:
        is_chat = "messages" in body
        request = text_request(body, context.id(), frozenset(fields))
        async with aclosing(answer(request, context)) as chunks:
            async for chunk in chunks:
                whole = text_chunk(dict(chunk), is_chat=is_chat)
                if chunk.get("log_probs"):
                    whole["choices"][0]["logprobs"] = openai_logprobs(chunk, is_chat=is_chat)
                yield whole

    return answer_body


def text_request(
    body: Mapping[str, Any], request_id: str, fields: Set[str] = frozenset()
) -> GenerateRequest:
    """Return the engine's request. Raise InvalidRequestError naming an unsupported field."""
    if body.get("n") not in (None, 1):
        raise InvalidRequestError("n: this engine generates one choice", param="n")
    if body.get("echo"):
        raise InvalidRequestError("echo: this engine gives no text of its prompt", param="echo")
    given = {name: value for name, value in body.items() if name in fields and value is not None}
    for name in body.keys() - fields - _READ - _NO_EFFECT - frozenset(_SAMPLING):
        if not _asks_for_nothing(name, body):
            raise InvalidRequestError(f"{name}: this engine does not support it", param=name)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit == 0:
        raise InvalidRequestError(
            "max_tokens: this engine generates at least one token", param="max_tokens"
        )
    stop = body.get("stop")
    request: GenerateRequest = {
        "token_ids": [],
        "model": str(body.get("model") or ""),
        "request_id": request_id,
        "sampling_options": {name: body[name] for name in _SAMPLING if body.get(name) is not None},
        "stop_conditions": {
            "max_tokens": limit,
            "min_tokens": body.get("min_tokens") or 0,
            "ignore_eos": bool(body.get("ignore_eos")),
            "stop": [stop] if isinstance(stop, str) else list(stop or []),
        },
        "output_options": {"logprobs": _num_logprobs(body)},
    }
    if given:
        request["body_fields"] = given
    if "messages" in body:
        request["messages"] = body["messages"]
    elif isinstance(body.get("prompt"), str):
        request["prompt"] = body["prompt"]
    else:
        raise InvalidRequestError("prompt: this engine takes one string", param="prompt")
    return request


def _asks_for_nothing(name: str, body: Mapping[str, Any]) -> bool:
    """Return True for a field whose value is the same as no field."""
    value = body[name]
    if name in ("tool_choice", "parallel_tool_calls") and not body.get("tools"):
        return value not in ("required",) and not isinstance(value, dict)
    if name == "response_format":
        return value in (None, {"type": "text"})
    return value is None or value == [] or value == {} or value is False


def _num_logprobs(body: Mapping[str, Any]) -> int | None:
    """Return the number of alternatives: `top_logprobs` in chat, `logprobs` in completions."""
    wanted = body.get("logprobs")
    if wanted is None or wanted is False:
        return None
    return int(body.get("top_logprobs") or 0) if wanted is True else int(wanted)


def openai_logprobs(chunk: GenerateChunk, *, is_chat: bool) -> dict[str, Any] | None:
    """Return a chunk's logprobs in OpenAI's form, None if the text of a token is missing."""
    log_probs = chunk.get("log_probs") or []
    tops = chunk.get("top_logprobs") or [[] for _ in log_probs]
    names = _token_texts(chunk, len(log_probs))
    if names is None or len(tops) != len(log_probs):
        return None
    if not is_chat:
        best = [{each["token"]: each["logprob"] for each in top} for top in tops]
        return {"tokens": names, "token_logprobs": log_probs, "top_logprobs": best}
    content = []
    for name, log_prob, top in zip(names, log_probs, tops, strict=True):
        alternatives = [_entry(each["token"], each["logprob"]) for each in top]
        content.append({**_entry(name, log_prob), "top_logprobs": alternatives})
    return {"content": content}


def _entry(token: str, log_prob: float) -> dict[str, Any]:
    return {"token": token, "logprob": log_prob, "bytes": list(token.encode())}


def _token_texts(chunk: GenerateChunk, num_tokens: int) -> list[str] | None:
    """Return the texts of the chosen tokens: by id among the best, or the chunk's one token."""
    tops, token_ids = chunk.get("top_logprobs") or [], chunk.get("token_ids") or []
    if len(tops) == len(token_ids) == num_tokens:
        found = [
            next((each.get("token") for each in top if each["token_id"] == token_id), None)
            for token_id, top in zip(token_ids, tops, strict=True)
        ]
        if all(isinstance(name, str) for name in found):
            return [str(name) for name in found]
    return [chunk.get("text", "")] if num_tokens == 1 else None
