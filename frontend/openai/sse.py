"""OpenAI's two streams as server-sent events: the bytes of a chunk, and the writer of a stream.

The bytes around a piece of content are the same in all chunks of one choice. They are encoded
once, and per chunk only the text is escaped.
"""

import msgspec

from tandem.frontend.chat.responses import (
    ChoiceTimeline,
    FunctionChunk,
    ResponseHead,
    ToolCallChunk,
    Usage,
    finish_reason_of,
)
from tandem.frontend.generation.generation import Answer, ChoiceRun
from tandem.frontend.http.events import DONE
from tandem.frontend.openai.echoed import echoed_logprobs
from tandem.frontend.parsers.pieces import Content, Piece, Reasoning, ToolCallDelta
from tandem.runtime.wire.messages import FinishReason, TokenDelta

_encode = msgspec.json.Encoder().encode


def usage_event(head: ResponseHead, usage: Usage) -> bytes:
    """Return the event with the token counts and no choice."""
    return b'%b],"usage":%b}\n\n' % (_prefix(head), _encode(usage))


def _prefix(head: ResponseHead) -> bytes:
    """Return an event up to its list of choices."""
    kind = b"chat.completion.chunk" if head.is_chat else b"text_completion"
    return b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
        _encode(head.response_id),
        kind,
        head.created_s,
        _encode(head.model),
    )


class ChunkWriter:
    """Writes the chunks of one choice as complete events."""

    __slots__ = (
        "_after_content", "_before_content", "_calls_functions", "_has_tool_calls", "_head",
        "_is_chat", "_suffix",
    )  # fmt: skip

    def __init__(self, head: ResponseHead, index: int) -> None:
        self._is_chat = head.is_chat
        self._calls_functions = head.calls_functions
        self._has_tool_calls = False
        self._head = b'%b{"index":%d,' % (_prefix(head), index)
        self._before_content = self._head + (b'"delta":{"content":' if head.is_chat else b'"text":')
        self._end_with(b'],"usage":null}\n\n' if head.with_usage else b"]}\n\n")

    def set_usage(self, usage: Usage) -> None:
        """Give the events from now on these token counts."""
        self._end_with(b'],"usage":%b}\n\n' % _encode(usage))

    def _end_with(self, suffix: bytes) -> None:
        self._suffix = suffix
        end_of_delta = b"}" if self._is_chat else b""
        self._after_content = b'%b,"logprobs":null,"finish_reason":null}%b' % (end_of_delta, suffix)

    def role(self) -> bytes:
        """Return the first event of a chat choice; nothing for a completion."""
        return self._event(b'"delta":{"role":"assistant","content":""}') if self._is_chat else b""

    def prompt(self, token_ids: list[int]) -> bytes:
        """Return the first event of a choice with the tokens of its prompt, which chat has beside
        the choices.
        """
        prompt = b',"prompt_token_ids":' + _encode(token_ids)
        if not self._is_chat:
            return self._event(b'"text":""', more=prompt)
        suffix, self._suffix = self._suffix, b"]" + prompt + self._suffix[1:]
        event, self._suffix = self.role(), suffix
        return event

    def piece(
        self,
        piece: Piece,
        logprobs: msgspec.Struct | None = None,
        token_ids: list[int] | None = None,
    ) -> bytes:
        """Return an event with a piece, and its log probabilities and tokens where given."""
        if type(piece) is Content and logprobs is None and token_ids is None:  # nearly every chunk
            return self._before_content + _encode(piece.text) + self._after_content
        if self._is_chat:
            delta = b'"delta":' + _encode(self._delta(piece))
        else:
            assert isinstance(piece, Content)
            delta = b'"text":' + _encode(piece.text)
        return self._event(delta, logprobs, more=_token_ids(token_ids))

    def finish(
        self,
        reason: FinishReason,
        timeline: ChoiceTimeline | msgspec.UnsetType = msgspec.UNSET,
        token_ids: list[int] | None = None,
        *,
        is_call_cut: bool = False,
    ) -> bytes:
        """Return the last event of a choice, with `timeline` as its `tandem`."""
        has_whole_calls = self._has_tool_calls and not is_call_cut
        finished = finish_reason_of(reason, has_whole_calls, calls_functions=self._calls_functions)
        tandem = b"" if timeline is msgspec.UNSET else b',"tandem":' + _encode(timeline)
        return self._event(
            b'"delta":{}' if self._is_chat else b'"text":""',
            reason=b'"%b"' % finished.encode(),
            more=tandem + _token_ids(token_ids),
        )

    def _delta(self, piece: Piece) -> dict[str, object]:
        match piece:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case ToolCallDelta():
                self._has_tool_calls = True
                if self._calls_functions:
                    return {"function_call": _function_chunk(piece)}
                return {"tool_calls": [_tool_call_chunk(piece)]}

    def _event(
        self,
        delta: bytes,
        logprobs: msgspec.Struct | None = None,
        reason: bytes = b"null",
        more: bytes = b"",
    ) -> bytes:
        return b'%b%b,"logprobs":%b,"finish_reason":%b%b}%b' % (
            self._head,
            delta,
            _encode(logprobs),
            reason,
            more,
            self._suffix,
        )


def _token_ids(token_ids: list[int] | None) -> bytes:
    return b"" if token_ids is None else b',"token_ids":' + _encode(token_ids)


def _function_chunk(piece: ToolCallDelta) -> FunctionChunk:
    return FunctionChunk(piece.arguments, piece.name or msgspec.UNSET)


def _tool_call_chunk(piece: ToolCallDelta) -> ToolCallChunk:
    function = _function_chunk(piece)
    if not piece.id:
        return ToolCallChunk(piece.index, function)
    return ToolCallChunk(piece.index, function, piece.id, "function")


class StreamWriter:
    """Answers by events. The status is sent with the first token of any choice."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        choices = answer.plan.choices
        self._writers = [ChunkWriter(answer.plan.head, choice.index) for choice in choices]
        self._has_logprobs = answer.plan.body.num_logprobs is not None
        self._has_token_ids = bool(answer.plan.body.return_token_ids)
        self._has_continuous_usage = answer.plan.body.has_continuous_usage

    async def begin(self, run: ChoiceRun) -> bytes:
        echo = run.choice.prompt.echo
        listed = None if run.prompt_logprobs is None else await echoed_logprobs(run)
        writer = self._writers[run.choice.index]
        self._count(writer)
        begin = writer.role()
        if self._has_token_ids:
            begin = writer.prompt(run.choice.prompt.token_ids)
        if echo or listed is not None:
            begin += writer.piece(Content(echo), listed)
        return begin

    def take(self, run: ChoiceRun, deltas: list[TokenDelta]) -> bytes:
        writer = self._writers[run.choice.index]
        if self._has_logprobs or self._has_token_ids:
            return b"".join(self._with_tokens(run, delta, writer) for delta in deltas)
        pieces = run.text.take(deltas)
        self._count(writer)
        if len(pieces) == 1:
            return writer.piece(pieces[0])
        return b"".join(map(writer.piece, pieces))

    async def end(self, run: ChoiceRun) -> bytes:
        assert run.text.finish_reason is not None
        writer = self._writers[run.choice.index]
        self._count(writer)
        end = run.text.stop_token_id
        token_ids = ([] if end is None else [end]) if self._has_token_ids else None
        body = writer.finish(
            run.text.finish_reason,
            self._answer.timeline(run),
            token_ids,
            is_call_cut=run.text.is_call_cut,
        )
        if self._answer.num_open:
            return body
        head = self._answer.plan.head
        if head.with_usage:
            body += usage_event(head, self._answer.usage())
        return body + DONE

    def _count(self, writer: ChunkWriter) -> None:
        if self._has_continuous_usage:
            writer.set_usage(self._answer.usage())

    def _with_tokens(self, run: ChoiceRun, delta: TokenDelta, writer: ChunkWriter) -> bytes:
        """Return the events of one delta. The first one has its tokens' ids and probabilities."""
        pieces = run.text.take([delta])
        self._count(writer)
        taken = run.text.taken(delta) if self._has_token_ids else None
        listed = self._listed(run, delta) if self._has_logprobs else None
        if listed is None and not taken:
            return b"".join(map(writer.piece, pieces))
        first, *rest = pieces or [Content("")]
        return writer.piece(first, listed, taken) + b"".join(map(writer.piece, rest))

    def _listed(self, run: ChoiceRun, delta: TokenDelta) -> msgspec.Struct | None:
        token_ids, logprobs = run.text.with_logprobs(delta)
        if not logprobs:
            return None
        if self._answer.plan.head.is_chat:
            return run.text.chat_logprobs(token_ids, logprobs)
        return run.text.completion_logprobs(token_ids, logprobs)
