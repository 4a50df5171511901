"""Server-sent events of OpenAI's two streams, spliced from bytes.

Everything around a piece of text is the same in all chunks of one choice, so it is encoded once;
per chunk only the text is escaped.
"""

from dataclasses import dataclass

import msgspec

from tandem.runtime.messages import FinishReason

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class StreamHead:
    """What all chunks of one response share."""

    response_id: str
    created_s: int  # unix seconds
    model: str
    is_chat: bool
    with_usage: bool  # every chunk has a `usage`, null but in the last

    def prefix(self) -> bytes:
        """An event up to its list of choices."""
        kind = b"chat.completion.chunk" if self.is_chat else b"text_completion"
        return b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            _encode(self.response_id),
            kind,
            self.created_s,
            _encode(self.model),
        )

    def suffix(self) -> bytes:
        """An event after its list of choices."""
        return b'],"usage":null}\n\n' if self.with_usage else b"]}\n\n"

    def usage_event(self, usage: msgspec.Struct) -> bytes:
        """The event with the token counts and no choice."""
        return b'%b],"usage":%b}\n\n' % (self.prefix(), _encode(usage))


class ChunkWriter:
    """Writes the chunks of one choice as complete events."""

    __slots__ = ("_after_text", "_before_text", "_between", "_index_head", "_is_chat", "_suffix")

    def __init__(self, head: StreamHead, index: int) -> None:
        self._is_chat = head.is_chat
        self._suffix = head.suffix()
        self._index_head = b'%b{"index":%d,' % (head.prefix(), index)
        if head.is_chat:
            self._before_text = self._index_head + b'"delta":{"content":'
            self._between = b'},"logprobs":'
        else:
            self._before_text = self._index_head + b'"text":'
            self._between = b',"logprobs":'
        self._after_text = self._between + b'null,"finish_reason":null}' + self._suffix

    def role(self) -> bytes:
        """The first event of a chat choice; nothing for a completion."""
        if not self._is_chat:
            return b""
        return (
            b'%b"delta":{"role":"assistant","content":""},"logprobs":null,'
            b'"finish_reason":null}%b'
            % (
                self._index_head,
                self._suffix,
            )
        )

    def text(self, text: str) -> bytes:
        """An event with new text."""
        return self._before_text + _encode(text) + self._after_text

    def text_with_logprobs(self, text: str, logprobs: msgspec.Struct) -> bytes:
        """An event with new text and its tokens' log probabilities."""
        return b'%b%b%b%b,"finish_reason":null}%b' % (
            self._before_text,
            _encode(text),
            self._between,
            _encode(logprobs),
            self._suffix,
        )

    def finish(
        self, reason: FinishReason, course: msgspec.Struct | msgspec.UnsetType = msgspec.UNSET
    ) -> bytes:
        """The last event of a choice; `course` is put into its `tandem`."""
        content = b'"delta":{}' if self._is_chat else b'"text":""'
        return b'%b%b,"logprobs":null,"finish_reason":"%b"%b}%b' % (
            self._index_head,
            content,
            reason.encode(),
            b"" if course is msgspec.UNSET else b',"tandem":' + _encode(course),
            self._suffix,
        )


def error_event(body: bytes) -> bytes:
    """An error, as its JSON body, in a stream whose status is already sent."""
    return b"data: %b\n\n" % body
