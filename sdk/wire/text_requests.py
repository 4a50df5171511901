"""Between the wire's TextRequest and the OpenAI bodies of text models.

`serving.py` makes one TextCodec per request.
"""

from typing import Any

import msgspec
from pydantic import BaseModel

from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.decoding import decode_json
from tandem.runtime.wire.messages import TextRequest
from tandem.sdk.wire.token_requests import finish_reason
from tandem.sdk.wire.values import as_plain


class TextCodec:
    """One request of a text model: `request` is the client's body.

    The handler yields OpenAI's objects, whole or in chunks, as dicts, Pydantic models or JSON; or
    pieces of text as `{"text": ..., "finish_reason": ..., "completion_usage": ...}`.
    """

    __slots__ = ("_is_chat", "request")

    def __init__(self, message: TextRequest) -> None:
        self.request: Any = decode_json(message.body, InvalidRequestError)
        self._is_chat = message.kind == "chat"

    def encode(self, item: Any) -> bytes:
        """Return an answer, or a chunk of it, as JSON. Raise ValueError where it is neither."""
        if isinstance(item, BaseModel):
            return item.model_dump_json().encode()
        if isinstance(item, str | bytes):
            data = item.encode() if isinstance(item, str) else item
            if not data.lstrip().startswith(b"{"):
                raise ValueError("a text model gave a string that is not a JSON object")
            return data
        if not isinstance(item, dict):
            raise ValueError(f"a text model gave a {type(item).__name__}, not a dict")
        if "choices" not in item and "error" not in item:
            item = text_chunk(item, is_chat=self._is_chat)
        return msgspec.json.encode(item, enc_hook=as_plain)

    def end(self) -> bytes | None:
        """Return None: the frontend ends an answer that a text model left open."""
        return None


def text_chunk(piece: dict[str, Any], *, is_chat: bool) -> dict[str, Any]:
    """Return a piece of text as OpenAI's chunk. Raise ValueError naming the key at fault."""
    text, delta = piece.get("text"), piece.get("delta") or {}
    has_part = text is not None or bool(delta) or "finish_reason" in piece
    if not isinstance(text, str | None) or not isinstance(delta, dict) or not has_part:
        raise ValueError("a text model's dict has neither `choices` nor a string as `text`")
    reason = piece.get("finish_reason")
    choice: dict[str, Any] = {
        "index": piece.get("index", 0),
        "logprobs": None,
        "finish_reason": None if reason is None else finish_reason(reason),
    }
    if not is_chat:
        choice["text"] = text or ""
    else:
        choice["delta"] = delta | ({"content": text} if text else {})
    chunk: dict[str, Any] = {"choices": [choice]}
    if piece.get("completion_usage") is not None:
        chunk["usage"] = piece["completion_usage"]
    return chunk
