"""Answers of models that write text themselves: OpenAI's objects, whole or in chunks, as JSON.

A worker may send either form, and the client gets the one that it asked for.
"""

from typing import Any, Protocol

import msgspec

from tandem.frontend.chat.responses import ResponseHead
from tandem.frontend.http.events import DONE, event
from tandem.runtime.errors import InternalError, ProtocolError

Answer = dict[str, Any]
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Answer).decode


def read_answer(item: bytes, head: ResponseHead) -> Answer:
    """Return one object of a worker, with the id, time and model of `head` where it has none.

    Raises ProtocolError when it is not an answer of this route, InternalError when it is an error.
    """
    try:
        answer = _decode(item)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the worker's answer is not a JSON object: {error}") from error
    if answer.get("error") is not None:
        raise InternalError(f"the worker answered an error: {answer['error']}")
    choices = answer.get("choices")
    if not isinstance(choices, list):
        raise ProtocolError("the worker's answer has no list of `choices`")
    for choice in choices:
        _check_choice(choice, head.is_chat)
    return _empty(head) | answer


def _empty(head: ResponseHead) -> Answer:
    """Return an answer without choices."""
    return {
        "id": head.response_id,
        "object": "chat.completion" if head.is_chat else "text_completion",
        "created": head.created_s,
        "model": head.model,
    }


def _check_choice(choice: object, is_chat: bool) -> None:
    if not isinstance(choice, dict):
        raise ProtocolError("a choice of the worker's answer is not an object")
    index = choice.setdefault("index", 0)
    if type(index) is not int:
        raise ProtocolError(f"a choice of the worker's answer has the index {index!r}")
    names = ("message", "delta") if is_chat else ("text",)
    kind = dict if is_chat else str
    if not any(isinstance(choice.get(name), kind) for name in names):
        raise ProtocolError(f"a choice of the worker's answer has no `{'` or `'.join(names)}`")


def is_whole(answer: Answer) -> bool:
    """Return True for a whole answer of chat. One of completions looks like its chunks."""
    return any("message" in choice for choice in answer["choices"])


def as_chunk(answer: Answer, head: ResponseHead) -> Answer:
    """Return `answer` as one chunk of a stream, without `usage`, which has a chunk of its own."""
    chunk = {key: value for key, value in answer.items() if key != "usage"}
    if head.is_chat:
        chunk["object"] = "chat.completion.chunk"
        chunk["choices"] = [_choice_as_chunk(choice) for choice in answer["choices"]]
    return chunk


def _choice_as_chunk(choice: Answer) -> Answer:
    if "message" not in choice:
        return choice
    delta = dict(choice["message"])
    if isinstance(delta.get("tool_calls"), list):
        delta["tool_calls"] = [
            {"index": index, **call} for index, call in enumerate(delta["tool_calls"])
        ]
    return {key: value for key, value in choice.items() if key != "message"} | {"delta": delta}


class TextWriter(Protocol):
    """Makes the response of a worker's answers."""

    def add(self, answer: Answer) -> bytes:
        """Take the next answer, whole or a chunk. Returns the bytes to send now."""

    def end(self) -> bytes:
        """Return the last bytes of the response."""


class StreamedText:
    """Writer of events, which also ends the choices that the worker left open."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._open: dict[int, bool] = {}  # by a choice's index, in order of appearance

    def add(self, answer: Answer) -> bytes:
        for choice in answer["choices"]:
            self._open[choice["index"]] = choice.get("finish_reason") is None
        usage = answer.get("usage")
        if not is_whole(answer):
            if self._head.is_chat:
                answer["object"] = "chat.completion.chunk"
            return event(_encode(answer))
        chunk = as_chunk(answer, self._head)
        if usage is None or not self._head.with_usage:
            return event(_encode(chunk))
        with_usage = {**chunk, "choices": [], "usage": usage}
        return event(_encode(chunk)) + event(_encode(with_usage))

    def end(self) -> bytes:
        content: Answer = {"delta": {}} if self._head.is_chat else {"text": ""}
        choices = [
            {"index": index, **content, "logprobs": None, "finish_reason": "stop"}
            for index, is_open in self._open.items()
            if is_open
        ]
        if not choices:
            return DONE
        chunk = as_chunk(_empty(self._head) | {"choices": choices}, self._head)
        return event(_encode(chunk)) + DONE


class WholeText:
    """Writer of one whole answer, joined from those of a worker."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._first: Answer | None = None
        self._choices: dict[int, Answer] = {}
        self._usage: Answer | None = None

    def add(self, answer: Answer) -> bytes:
        self._first = self._first or answer
        self._usage = answer.get("usage") or self._usage
        for choice in as_chunk(answer, self._head)["choices"]:
            self._add_choice(choice)
        return b""

    def _add_choice(self, choice: Answer) -> None:
        whole = self._choices.setdefault(choice["index"], {"index": choice["index"]})
        for key, value in choice.items():
            if key == "delta":
                _merge(whole.setdefault("message", {"role": "assistant", "content": None}), value)
            elif key == "text":
                whole["text"] = whole.get("text", "") + value
            elif key == "logprobs" and isinstance(value, dict) and whole.get("logprobs"):
                _extend(whole["logprobs"], value)
            elif value is not None or key not in whole:
                whole[key] = value

    def end(self) -> bytes:
        assert self._first is not None
        choices = [self._choices[index] for index in sorted(self._choices)]
        for choice in choices:
            choice.setdefault("logprobs", None)
            choice["finish_reason"] = choice.get("finish_reason") or "stop"
        kind = "chat.completion" if self._head.is_chat else "text_completion"
        whole = self._first | {"object": kind, "choices": choices}
        if self._usage is not None:
            whole["usage"] = self._usage
        return _encode(whole)


def _merge(message: Answer, delta: Answer) -> None:
    """Merge a chat chunk's delta into the message so far: append text, replace the rest."""
    for key, value in delta.items():
        if key == "tool_calls" and isinstance(value, list):
            _merge_tool_calls(message.setdefault("tool_calls", []), value)
        elif key != "role" and isinstance(value, str) and isinstance(message.get(key), str):
            message[key] += value
        elif value is not None or key not in message:
            message[key] = value


def _merge_tool_calls(calls: list[Answer], pieces: list[Answer]) -> None:
    for piece in pieces:
        index = piece.get("index", len(calls))
        if type(index) is not int or not 0 <= index <= len(calls):
            raise ProtocolError(f"the worker's answer has a tool call with the index {index!r}")
        if index == len(calls):
            calls.append({})
        call = calls[index]
        for key, value in piece.items():
            if key == "function" and isinstance(value, dict):
                _merge(call.setdefault("function", {}), value)
            elif key != "index" and value is not None:
                call[key] = value


def _extend(logprobs: Answer, more: Answer) -> None:
    for key, value in more.items():
        if isinstance(value, list) and isinstance(logprobs.get(key), list):
            logprobs[key] += value
        elif value is not None:
            logprobs[key] = value
