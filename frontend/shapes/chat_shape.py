"""A chat that another API stands for: its body, its generation, and the names in its errors."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tandem.frontend.chat.requests import ChatRequest
from tandem.frontend.chat.responses import ResponseHead
from tandem.frontend.chat.text_body import parse_text
from tandem.frontend.generation.generation import Answer, Sink
from tandem.frontend.generation.piece_sink import PieceSink, PieceWriter
from tandem.frontend.generation.plan import of_tokens
from tandem.frontend.http.api import Call, Work
from tandem.frontend.http.exchange import Exchange
from tandem.frontend.shapes.generations import Generations
from tandem.frontend.text.answers import TextWriter
from tandem.frontend.text.pieces import TextPieces
from tandem.runtime.errors import InvalidRequestError

_encode = msgspec.json.Encoder().encode
_TOOL = re.compile(r"tools\[(\d+)\]")


class FieldNames:
    """The fields of a chat in the names of another API: patterns |-> names."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = [(re.compile(rf"^{pattern}"), name) for pattern, name in names.items()]

    def of_tools(self, tools: list[str]) -> Callable[[str], str]:
        """Return the renaming of a chat whose tools are these fields of the client's body."""

        def renamed(field: str) -> str:
            for pattern, name in self._names:
                field = pattern.sub(name, field)
            found = _TOOL.match(field)
            if found is not None and int(found[1]) < len(tools):
                field = tools[int(found[1])] + field[found.end() :]
            return field

        return renamed


class ChatShape:
    """Chats of one API. Their models read tokens or text."""

    def __init__(self, generations: Generations, names: FieldNames) -> None:
        self._generations = generations
        self._names = names

    async def prepare(
        self, fields: dict[str, Any], tools: list[str], writer: PieceWriter, call: Call
    ) -> Work:
        """Return the generation of a chat with these fields. Its pieces go to `writer`.

        `tools` has the fields of the chat's tools. Both raise InvalidRequestError naming the field
        of the API.
        """
        names = call.ignored.rename = self._names.of_tools(tools)
        try:
            work = await self._prepare(fields, writer, call)
        except InvalidRequestError as error:
            raise _translated(error, names) from error
        return self._translated(work, names)

    async def _translated(self, work: Work, names: Callable[[str], str]) -> None:
        """Do the work; a worker may refuse a grammar, and so a field."""
        try:
            await work
        except InvalidRequestError as error:
            raise _translated(error, names) from error

    async def _prepare(self, fields: dict[str, Any], writer: PieceWriter, call: Call) -> Work:
        generations, is_stream = self._generations, bool(fields.get("stream"))
        call.exchange.errors = writer
        raw = _encode(fields)
        if generations.is_for_text_model(raw):
            options = {"stream_options": {"include_usage": True}} if is_stream else {}

            def new_writer(head: ResponseHead) -> TextWriter:
                return TextPieces(head, writer, is_stream=is_stream)

            text_body = parse_text("chat", _encode(fields | options))
            return generations.of_text(text_body, new_writer, call)

        def new_sink(answer: Answer, exchange: Exchange) -> Sink:
            return PieceSink(answer, exchange, writer, is_stream=is_stream)

        return await generations.of_tokens(self._request(fields, call), new_sink, call)

    async def num_tokens(self, fields: dict[str, Any], tools: list[str], call: Call) -> int:
        """Return the number of tokens in the prompt of a chat.

        Raises InvalidRequestError naming the field of the API.
        """
        generations = self._generations
        names = call.ignored.rename = self._names.of_tools(tools)
        try:
            body = self._request(fields, call)
            model = of_tokens(generations.model(body.model, "chat", call))
            return len(await generations.prompt_maker.chat_tokens(body, model))
        except InvalidRequestError as error:
            raise _translated(error, names) from error

    def _request(self, fields: dict[str, Any], call: Call) -> ChatRequest:
        """Return the checked chat. Raises InvalidRequestError naming the field of the chat."""
        return self._generations.parse(ChatRequest, _encode(fields), call.ignored)


def _translated(error: InvalidRequestError, names: Callable[[str], str]) -> InvalidRequestError:
    """Return an error that names the field that the client sent."""
    if error.param is None:
        return error
    param = names(error.param)
    return type(error)(error.message.replace(f"`{error.param}`", f"`{param}`"), param=param)
