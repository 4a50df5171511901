"""A chat that another API has read, and its generation."""

from functools import partial

import msgspec

from tandem.frontend.chat.body import StreamOptions
from tandem.frontend.chat.origins import Origins
from tandem.frontend.chat.requests import Chat
from tandem.frontend.chat.text_body import TextBody
from tandem.frontend.generation.piece_writer import ChoiceWriter, PieceWriter
from tandem.frontend.generation.plan import of_tokens
from tandem.frontend.http.api import Call, Work
from tandem.frontend.shapes.generations import Generations
from tandem.frontend.text.pieces import TextPieces
from tandem.runtime.errors import InvalidRequestError


class ChatShape:
    """Chats of one API. Their models read tokens or text."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    async def prepare(self, chat: Chat, writer: PieceWriter, call: Call) -> Work:
        """Return the generation of a chat, whose pieces go to `writer`.

        Both raise InvalidRequestError naming the field of the API.
        """
        generations, is_stream = self._generations, bool(chat.stream)
        call.exchange.errors = writer
        chat.check_messages()
        if generations.reads_text(chat.model):
            if is_stream:
                options = StreamOptions(include_usage=True)
                chat = msgspec.structs.replace(chat, stream_options=options)
            body = TextBody(chat.model, "chat", is_stream, is_stream, chat.in_openais_shape())
            work = generations.of_text(body, partial(TextPieces, writer=writer), call)
            return _named(work, chat.origins)

        chat.check(generations.config, call.ignored)
        return await generations.of_tokens(chat, partial(ChoiceWriter, writer=writer), call)

    async def num_tokens(self, chat: Chat, call: Call) -> int:
        """Return the number of tokens in the prompt of a chat.

        Raises InvalidRequestError naming the field of the API.
        """
        generations = self._generations
        chat.check_messages()
        chat.check(generations.config, call.ignored)
        model = of_tokens(generations.model(chat.model, "chat", call))
        return len(await generations.prompt_maker.chat_tokens(chat, model))


async def _named(work: Work, origins: Origins) -> None:
    """Do the work of a worker that reads text: its errors name fields of the chat that it got."""
    try:
        await work
    except InvalidRequestError as error:
        raise origins.named(error) from error.__cause__
