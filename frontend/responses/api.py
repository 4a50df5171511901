"""POST /v1/responses: a chat in another shape, which the frontend may keep."""

import msgspec

from tandem.frontend.bodies.images import Images
from tandem.frontend.chat.origins import Origins
from tandem.frontend.chat.requests import Chat
from tandem.frontend.errors import OpenAIErrors
from tandem.frontend.http.api import Call, Work, let_others_run
from tandem.frontend.responses.items import Conversation, Item, Placed, Reading
from tandem.frontend.responses.objects import new_response
from tandem.frontend.responses.requests import SCHEMA, ResponsesRequest, parse
from tandem.frontend.responses.shared import SharedResponses
from tandem.frontend.responses.store import Stored
from tandem.frontend.responses.tools import Tools, read_all
from tandem.frontend.responses.writer import ResponseWriter
from tandem.frontend.shapes.chat_shape import ChatShape
from tandem.frontend.shapes.generations import Generations

_SAME_FIELDS = (
    "parallel_tool_calls", "chat_template_kwargs", "stream", "enable_thinking", "thinking",
    "include_reasoning",
)  # fmt: skip


class ResponsesApi:
    """Bodies of the Responses API."""

    errors = OpenAIErrors()

    def __init__(self, generations: Generations, store: SharedResponses, max_bytes: int) -> None:
        self._max_bytes = max_bytes  # of a conversation
        self._generations = generations
        self._chat = ChatShape(generations)
        self._store = store

    async def prepare(self, raw: bytes, call: Call) -> Work:
        request = parse(raw, call.ignored)
        images = self._generations.images(request.model)
        reading = Reading(
            call.ignored,
            sees=images is not None,
            images_as_text=self._generations.config.images_as_text,
        )
        items = request.inputs(reading)
        tools = read_all(request.tools, request.tool_choice, call.ignored)
        history = await self._store.conversation(
            request.previous_response_id, call.owner, self._max_bytes, sees=images is not None
        )
        await let_others_run(len(raw))
        chat = chat_of(request, history, items, tools, images)
        writer = self._writer(request, tools, [item for _, item in items], call)
        await let_others_run(len(raw))
        return await self._chat.prepare(chat, writer, call)

    def _writer(
        self, request: ResponsesRequest, tools: Tools, items: list[Item], call: Call
    ) -> ResponseWriter:
        is_stored = request.store is not False and self._store.is_on
        response_id = self._store.new_id(call.context.id)

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


def chat_of(
    request: ResponsesRequest,
    history: list[Item],
    items: list[Placed],
    tools: Tools,
    images: Images | None,
) -> Chat:
    """Return the chat that a request stands for. Raises InvalidRequestError naming the field."""
    conversation = Conversation(request.instructions, images)
    for item in history:
        conversation.add("previous_response_id", item)
    for origin, item in items:
        conversation.add(origin, item)
    conversation.end_results("input")
    same = {name: getattr(request, name) for name in _SAME_FIELDS} | request.sampling()
    form = None if request.text is None else request.text.format
    return Chat(
        model=request.model,
        messages=conversation.messages,
        max_completion_tokens=request.max_output_tokens,
        tools=tools.for_chat(),
        tool_choice=tools.choice_for_chat(),
        reasoning=request.reasoning and request.reasoning.for_chat(),
        logprobs=True if request.wants_logprobs else None,
        top_logprobs=request.top_logprobs if request.wants_logprobs else None,
        response_format=None if form is None else form.for_chat(),
        origins=Origins(
            prompt="input",
            max_tokens="max_output_tokens",
            format="text.format",
            schema=SCHEMA,
            chosen="tool_choice.name",
            allowed="tool_choice.tools",
            tools=[each.field for each in tools.callables],
            messages=conversation.origins,
        ),
        **same,
    )
