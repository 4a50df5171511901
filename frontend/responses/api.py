"""POST /v1/responses: a chat in another shape, which the frontend may keep."""

from typing import Any

import msgspec

from tandem.frontend.errors import OpenAIErrors
from tandem.frontend.http.api import Call, Work, let_others_run
from tandem.frontend.responses.items import Conversation, Item, Reading
from tandem.frontend.responses.objects import new_response
from tandem.frontend.responses.requests import ResponsesRequest, parse
from tandem.frontend.responses.store import ResponseStore, Stored
from tandem.frontend.responses.tools import Tools, read_all
from tandem.frontend.responses.writer import ResponseWriter
from tandem.frontend.shapes.chat_shape import ChatShape, FieldNames
from tandem.frontend.shapes.generations import Generations

_SAME_FIELDS = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "parallel_tool_calls",
    "top_k", "min_p", "repetition_penalty", "seed", "cache_salt", "chat_template_kwargs", "stream",
    "enable_thinking", "thinking", "include_reasoning", "allowed_token_ids", "bad_words",
)  # fmt: skip
NAMES = FieldNames(
    {
        r"messages\b.*": "input",
        r"max_(completion_)?tokens": "max_output_tokens",
        r"response_format\b(\.json_schema)?": "text.format",
        r"(tools\[\d+\])\.function": r"\1",
        r"(tool_choice)\.function": r"\1",
    }
)


class ResponsesApi:
    """Bodies of the Responses API."""

    errors = OpenAIErrors()

    def __init__(self, generations: Generations, store: ResponseStore, max_bytes: int) -> None:
        self._max_bytes = max_bytes  # of a conversation
        self._images_as_text = generations.config.images_as_text
        self._generations = generations
        self._chat = ChatShape(generations, NAMES)
        self._store = store

    async def prepare(self, raw: bytes, call: Call) -> Work:
        request = parse(raw, call.ignored)
        reading = Reading(call.ignored, images_as_text=self._images_as_text)
        items = request.inputs(reading)
        tools = read_all(request.tools, request.tool_choice, call.ignored)
        history = self._store.conversation(
            request.previous_response_id, call.owner, self._max_bytes
        )
        await let_others_run(len(raw))
        fields = chat_fields(request, history, items) | tools.chat_fields()
        writer = self._writer(request, tools, items, call)
        await let_others_run(len(raw))
        places = [each.field for each in tools.callables]
        return await self._chat.prepare(fields, places, writer, call)

    def _writer(
        self, request: ResponsesRequest, tools: Tools, items: list[Item], call: Call
    ) -> ResponseWriter:
        is_stored = request.store is not False and self._store.is_on
        response_id = f"resp_{call.context.id}"

        def keep(body: bytes) -> None:
            if is_stored:
                inputs = msgspec.json.encode(items)
                stored = Stored(call.owner, request.previous_response_id, inputs, body)
                self._store.put(response_id, stored)

        defaults = self._generations.default_sampling(request.model)
        return ResponseWriter(
            new_response(request, tools, response_id, defaults, is_stored=is_stored),
            keep,
            is_stream=bool(request.stream),
            is_encrypted=request.wants_encrypted_reasoning,
            tools={each.name: each for each in tools.callables},
        )


def chat_fields(
    request: ResponsesRequest, history: list[Item], items: list[Item]
) -> dict[str, Any]:
    """Return the fields of the chat that a request stands for."""
    conversation = Conversation(request.instructions)
    conversation.add(history + items)
    fields: dict[str, Any] = {"model": request.model, "messages": conversation.messages}
    fields |= {name: getattr(request, name) for name in _SAME_FIELDS}
    fields["max_completion_tokens"] = request.max_output_tokens
    if request.reasoning is not None:
        fields["reasoning"] = request.reasoning.for_chat()
    if request.text is not None and request.text.format is not None:
        fields["response_format"] = _response_format(request.text.format)
    return {name: value for name, value in fields.items() if value is not None}


def _response_format(given: Any) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type or "text"}
    schema = {
        name: value
        for name in ("name", "description", "schema", "strict")
        if (value := getattr(given, name)) not in (msgspec.UNSET, None)
    }
    return {"type": "json_schema", "json_schema": schema}
