"""The decoding of what another process sent: in one place, to messages alone, with one error."""

import logging
import re
from collections.abc import Callable
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from tandem.runtime.errors import ProtocolError, TandemError
from tandem.runtime.printable import one_line, short
from tandem.runtime.wire.bounds import Message

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Decode = Callable[[bytes | memoryview], T]

MAX_NESTING = 64  # of JSON; what is made of a value may recurse more often than its decoder
_MAX_REASON_BYTES = 300
_MAX_NOTED = 1000
# RecursionError comes from deep nesting, ValueError from texts that are not UTF-8, or long numbers.
_ERRORS = (msgspec.MsgspecError, RecursionError, ValueError)
_PATH = re.compile(r"`\$([^`]*)`")
_FIELD = re.compile(r"\.(\w+)")
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def decoder(kind: type[M] | UnionType, error: type[TandemError] = ProtocolError) -> Decode[M]:
    """Return the function from msgpack to a message of `kind`, or of one of several kinds.

    The function raises `error`, in one line and with the field at fault, for any other bytes:
    InvalidRequestError is meant for requests, ProtocolError for answers and events.
    """
    return _guarded(msgspec.msgpack.Decoder(kind).decode, kind, error)


def json_decoder(kind: type[M], error: type[TandemError] = ProtocolError) -> Decode[M]:
    """Return the same function for JSON, which may be nested `MAX_NESTING` deep."""
    return _guarded(_shallow(msgspec.json.Decoder(kind).decode), kind, error)


def _guarded(decode: Decode[M], kind: type[M] | UnionType, error: type[TandemError]) -> Decode[M]:
    kinds = get_args(kind) if isinstance(kind, UnionType) else (get_origin(kind) or kind,)
    assert all(issubclass(each, Message) for each in kinds), f"{kinds} have no bounds"
    what = kinds[0].__name__ if len(kinds) == 1 else "message"

    def guarded(data: bytes | memoryview) -> M:
        try:
            return decode(data)
        except _ERRORS as cause:
            raise _refusal(f"malformed {what}", cause, error) from None

    return guarded


def _refusal(what: str, cause: Exception, error: type[TandemError]) -> TandemError:
    reason = "nested too deeply" if isinstance(cause, RecursionError) else str(cause)
    path = _PATH.search(reason)
    fields = _FIELD.findall(path[1]) if path is not None else []
    message = f"{what}: {one_line(reason, _MAX_REASON_BYTES)}"
    return error(message, param=fields[-1] if fields else None)


def decode_value(data: bytes | memoryview, error: type[TandemError] = ProtocolError) -> Any:
    """Return any plain value in msgpack. Raise `error` for other bytes."""
    try:
        return _decode_plain(data)
    except _ERRORS as cause:
        raise _refusal("malformed msgpack", cause, error) from None


def decode_json(data: bytes, error: type[TandemError] = ProtocolError) -> Any:
    """Return any plain value in JSON, `MAX_NESTING` deep at most. Raise `error` for other bytes."""
    try:
        return _decode_plain_json(data)
    except _ERRORS as cause:
        raise _refusal("malformed JSON", cause, error) from None


class RefusalLog:
    """Lines of the log on refused messages: one for each sender and field, not for each message."""

    def __init__(self, logger: logging.Logger, what: str) -> None:
        self._logger = logger
        self._what = what
        self._noted: set[tuple[str, str | None]] = set()

    def note(self, sender: str, error: TandemError) -> None:
        """Log that a message of `sender` is dropped, unless that is known."""
        if (key := (sender, error.param)) not in self._noted:
            if len(self._noted) >= _MAX_NOTED:
                self._noted.clear()
            self._noted.add(key)
            self._logger.warning("dropped %s of %s: %s", self._what, short(sender), error.message)


def _shallow(decode: Decode[T]) -> Decode[T]:
    def decode_shallow(data: bytes | memoryview) -> T:
        if _is_deep(bytes(data)):
            raise RecursionError
        return decode(data)

    return decode_shallow


def _is_deep(text: bytes) -> bool:
    """Return True for more than MAX_NESTING levels of brackets, or for some without their end."""
    if text.count(b"[") + text.count(b"{") <= MAX_NESTING:
        return False
    parts = text.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')  # every other is a string
    levels = b"".join(parts[::2]).translate(_BRACKETS, _OTHERS)
    for _ in range(MAX_NESTING):
        num_brackets = len(levels)
        levels = levels.replace(b"[]", b"")  # the innermost
        if len(levels) == num_brackets:
            break
    return bool(levels)


_decode_plain = msgspec.msgpack.Decoder().decode
_decode_plain_json = _shallow(msgspec.json.Decoder().decode)
