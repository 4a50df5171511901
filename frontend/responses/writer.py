"""The response of one choice in the shape of the Responses API: a `PieceWriter`."""

from collections.abc import Callable, Mapping

import msgspec
from msgspec import UNSET

from tandem.frontend.errors import OpenAIErrors
from tandem.frontend.generation.piece_writer import Ending
from tandem.frontend.http.events import DONE
from tandem.frontend.parsers.pieces import Content, Piece, Reasoning, ToolCallDelta, part_key
from tandem.frontend.responses.events import (
    Events,
    OpenCall,
    OpenInput,
    OpenItem,
    OpenReasoning,
    OpenText,
)
from tandem.frontend.responses.items import Status
from tandem.frontend.responses.objects import (
    OutputCall,
    OutputInput,
    OutputItem,
    Response,
    ended,
    failed,
)
from tandem.frontend.responses.tools import CallableTool, CustomTool
from tandem.frontend.telemetry.request_log import TokenCounts
from tandem.runtime.address import new_id
from tandem.runtime.errors import TandemError

_encode = msgspec.json.Encoder().encode


class ResponseWriter(OpenAIErrors):
    """Joins the pieces of one kind to an item. `keep` gets the JSON of a response that has ended.

    Errors before the stream are those of chat.
    """

    def __init__(
        self,
        response: Response,
        keep: Callable[[bytes], None],
        *,
        is_stream: bool,
        is_encrypted: bool,
        tools: Mapping[str, CallableTool],
    ) -> None:
        self._response = response
        self._keep = keep
        self._is_stream = is_stream
        self._events = Events(is_stream=is_stream)
        self._is_encrypted = is_encrypted
        self._tools = tools  # by their names in the chat
        self._output: list[OutputItem] = []  # those that are closed
        self._open: OpenItem | None = None
        self._open_key: object = None  # the kind of the open item, or the index of its call

    def begin(self, tokens: TokenCounts) -> bytes:
        if not self._is_stream:
            return b""
        response = msgspec.Raw(_encode(self._response))
        return self._events("response.created", response=response) + self._events(
            "response.in_progress", response=response
        )

    def take(self, pieces: list[Piece]) -> bytes:
        return b"".join(map(self._take, pieces))

    def end(self, ending: Ending) -> bytes:
        is_cut = ending.reason == "length"
        begin = b"" if self._output or self._open else self._opened(Content(""))
        closed = begin + self._close("incomplete" if is_cut or ending.is_call_cut else "completed")
        body = _encode(ended(self._response, self._output, ending))
        self._keep(body)
        if not self._is_stream:
            return body
        kind = "response.incomplete" if is_cut else "response.completed"
        return closed + self._events(kind, response=msgspec.Raw(body)) + DONE

    def event(self, error: TandemError) -> bytes:
        closed = self._close("incomplete")
        response = failed(self._response, self._output, error.message)
        return closed + self._events("response.failed", response=response) + DONE

    def _take(self, piece: Piece) -> bytes:
        opened = b""
        if self._open is None or self._open_key != part_key(piece):
            opened = self._close("completed") + self._opened(piece)
        assert self._open is not None
        if isinstance(self._open, OpenText) and isinstance(piece, Content):
            return opened + self._open.add(piece.text, piece.logprobs)
        text = piece.arguments if isinstance(piece, ToolCallDelta) else piece.text
        return opened + self._open.add(text)

    def _opened(self, piece: Piece) -> bytes:
        """Begin the item that a piece belongs to."""
        index, number = len(self._output), new_id()
        self._open_key = part_key(piece)
        match piece:
            case Content():
                self._open = OpenText(self._events, f"msg_{number}", index)
            case Reasoning():
                self._open = OpenReasoning(
                    self._events, f"rs_{number}", index, is_encrypted=self._is_encrypted
                )
            case ToolCallDelta():
                self._open = self._opened_call(piece, number, index)
        return self._open.begin()

    def _opened_call(self, piece: ToolCallDelta, number: str, index: int) -> OpenItem:
        called = self._tools.get(piece.name)
        name = piece.name if called is None else called.tool.name
        namespace = UNSET if called is None or called.namespace is None else called.namespace
        call_id = piece.id or f"call_{number}"
        if called is not None and isinstance(called.tool, CustomTool):
            given = OutputInput(f"ctc_{number}", call_id, name, "", "in_progress", namespace)
            return OpenInput(self._events, given, index)
        call = OutputCall(f"fc_{number}", call_id, name, "", "in_progress", namespace)
        return OpenCall(self._events, call, index)

    def _close(self, status: Status) -> bytes:
        if self._open is None:
            return b""
        item, self._open = self._open, None
        self._output.append(item.item(status))
        return item.end(status)
