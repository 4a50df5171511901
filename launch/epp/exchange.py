"""One request of a Gateway: its messages in, and the answers to them."""

from tandem.frontend.access.room import Room
from tandem.frontend.errors import error_body
from tandem.launch.epp.messages import (
    Message,
    Pick,
    chunks,
    head_of,
    passed_on,
    refused,
    subset_of,
)
from tandem.launch.epp.picker import Picker
from tandem.launch.epp.protos import Mode
from tandem.runtime.errors import OverloadedError, ProtocolError

_MAX_HEAD_BYTES = 256 * 1024  # with the subset of endpoints
_BUFFERED = (Mode.BUFFERED, Mode.BUFFERED_PARTIAL)


class Exchange:
    """The state of one request. `take` answers its messages in their order.

    The prompt is read where the headers can wait for it: by full duplex streaming, which the
    protocol asks for and is meant where a Gateway names no mode, or buffered. Where they cannot, or
    the body is larger than `max_body_bytes` or finds no room, the frontend chooses the worker.
    """

    def __init__(self, request_id: str, picker: Picker, bodies: Room, max_body_bytes: int) -> None:
        self._id = request_id
        self._picker = picker
        self._bodies = bodies
        self._max_body_bytes = max_body_bytes
        self._modes = dict.fromkeys(("request_body", "response_body"), Mode.FULL_DUPLEX_STREAMED)
        self._head: dict[bytes, bytes] = {}
        self._subset: frozenset[str] | None = None
        self._body = bytearray()  # as far as it has come, while the headers wait for it
        self._num_held = 0  # bytes of it that have room
        self._owes_head = False  # an answer to the headers
        self._pick: Pick | None = None

    @property
    def is_picked(self) -> bool:
        """True once the Gateway knows the frontend."""
        return self._pick is not None

    def close(self) -> None:
        """Give back the room for the body; the request itself is the picker's."""
        self._bodies.give_back(self._num_held, "")
        self._num_held = 0
        self._body = bytearray()

    async def take(self, message: Message) -> list[Message]:
        """Return the answers to a message. Raise OverloadedError where there is no frontend.

        Raise ProtocolError for a message of no kind.
        """
        kind = message.WhichOneof("request")
        if kind is None:
            raise ProtocolError("a message of no kind")
        part = getattr(message, kind)
        if kind == "request_headers" and self._pick is None:
            return await self._take_head(message)
        if kind == "request_body" and self._pick is None:
            return await self._take_body(part)
        if kind == "request_trailers" and self._owes_head:
            return [
                *await self._pick_with_body(bytes(self._body), is_end=False),
                passed_on(kind),
            ]
        if kind == "response_headers":
            self._picker.answered(self._id)
        if self._modes.get(kind) == Mode.FULL_DUPLEX_STREAMED:
            return list(chunks(kind, part.body, is_end=part.end_of_stream))
        return [passed_on(kind)]

    async def _take_head(self, message: Message) -> list[Message]:
        head = message.request_headers
        if message.ByteSize() > _MAX_HEAD_BYTES:
            raise ProtocolError(f"headers and metadata of more than {_MAX_HEAD_BYTES} bytes")
        self._head, self._subset = head_of(head), subset_of(message)
        if message.HasField("protocol_config"):
            self._modes["request_body"] = message.protocol_config.request_body_mode
            self._modes["response_body"] = message.protocol_config.response_body_mode
        mode = self._modes["request_body"]
        if head.end_of_stream or mode not in (*_BUFFERED, Mode.FULL_DUPLEX_STREAMED):
            return [(await self._choose(None)).answer("request_headers")]
        if mode in _BUFFERED:
            return [passed_on("request_headers")]
        self._owes_head = True
        return []

    async def _take_body(self, part: Message) -> list[Message]:
        if not self._head:
            raise ProtocolError("a body before its headers")
        is_held = self._hold(part.body)
        body = bytes(self._body) if is_held else None
        if self._modes["request_body"] in _BUFFERED:
            return [(await self._choose(body)).answer("request_body")]
        if is_held and not part.end_of_stream:
            return []
        return await self._pick_with_body(body, is_end=part.end_of_stream)

    def _hold(self, part: bytes) -> bool:
        """Add a part to the body; False where it becomes too large, which is the last part then."""
        self._body += part
        is_small = len(self._body) <= self._max_body_bytes
        if not is_small or not self._bodies.take(len(part), ""):
            return False
        self._num_held += len(part)
        return True

    async def _pick_with_body(self, body: bytes | None, *, is_end: bool) -> list[Message]:
        """Answer the headers that wait, and give the body back."""
        head = (await self._choose(body)).answer("request_headers")
        self._owes_head = False
        return [head, *chunks("request_body", bytes(self._body), is_end=is_end)]

    async def _choose(self, body: bytes | None) -> Pick:
        self._pick = await self._picker.pick(self._id, self._head, body, self._subset)
        return self._pick


def refusal(error: OverloadedError) -> Message:
    """Return the end of a request that goes to no frontend: 503 without one, 429 for too many."""
    return refused(error.status, error_body(error), max(1, round(error.retry_after_s)))
