"""POST /v1/messages and /v1/messages/count_tokens: chats in Anthropic's shape."""

from tandem.frontend.anthropic.errors import AnthropicErrors
from tandem.frontend.anthropic.requests import LARGE, Conversing, MessagesRequest
from tandem.frontend.anthropic.writer import MessageWriter
from tandem.frontend.bodies.typed import read_body
from tandem.frontend.chat.requests import Chat
from tandem.frontend.http.api import Call, Work, let_others_run, respond
from tandem.frontend.shapes.chat_shape import ChatShape
from tandem.frontend.shapes.generations import Generations


class MessagesApi:
    """Bodies of messages."""

    errors = AnthropicErrors()

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._chat = ChatShape(generations)

    async def prepare(self, raw: bytes, call: Call) -> Work:
        request = read_body(MessagesRequest, raw, LARGE, call.ignored)
        call.clamps_max_tokens = True  # clients of this API send the limit of another model
        writer = MessageWriter(call.context.id, request.model, is_stream=bool(request.stream))
        await let_others_run(len(raw))
        chat = _chat_of(request, call, self._generations)
        await let_others_run(len(raw))
        return await self._chat.prepare(chat, writer, call)


class CountTokensApi:
    """Bodies whose tokens are counted; nothing is generated."""

    errors = AnthropicErrors()

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._chat = ChatShape(generations)

    async def prepare(self, raw: bytes, call: Call) -> Work:
        request = read_body(Conversing, raw, LARGE, call.ignored)
        chat = _chat_of(request, call, self._generations)
        num_tokens = await self._chat.num_tokens(chat, call)
        return respond({"input_tokens": num_tokens}, call)


def _chat_of(request: Conversing, call: Call, generations: Generations) -> Chat:
    images, as_text = generations.images(request.model), generations.config.images_as_text
    return request.chat(call.ignored, images, images_as_text=as_text)
