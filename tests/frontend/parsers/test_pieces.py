"""Reasoning and tool calls of a parser, carried to the client in streams and whole answers."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tandem.frontend.generation.answer_format import AnswerFormat
from tandem.frontend.parsers.pieces import Content, Piece, Reasoning, ToolCallDelta
from tests.frontend.frontend_stack import Stack, answer_with, events_of
from tests.frontend.generation.test_migration import telling

TEXT = "~hm, ~hello f:x f:y"


class LetterParser:
    """`~` begins and ends reasoning, `f:` begins a call; what follows is its arguments."""

    is_in_call = False

    def __init__(self) -> None:
        self._is_reasoning = False
        self._num_calls = 0
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for letter in text:
            pieces += self._letter(self._held + letter)
        return pieces

    def _letter(self, text: str) -> list[Piece]:
        self._held = ""
        if text == "~":
            self._is_reasoning = not self._is_reasoning
            return []
        if self._is_reasoning:
            return [Reasoning(text)]
        if text == "f":
            self._held = text
            return []
        if text == "f:":
            self._num_calls += 1
            index = self._num_calls - 1
            return [ToolCallDelta(index, id=f"call_{index}", name="f")]
        return [ToolCallDelta(self._num_calls - 1, text) if self._num_calls else Content(text)]

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        return [ToolCallDelta(self._num_calls - 1, ".")] if self._num_calls else []


@pytest.fixture
async def parsed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    monkeypatch.setattr(AnswerFormat, "new_parser", lambda *_: LetterParser())
    async with Stack() as stack:
        stack.worker.script = answer_with(TEXT, tokens_per_delta=3)
        yield stack


async def test_an_answer_of_calls_alone_has_no_content(parsed: Stack) -> None:
    parsed.worker.script = answer_with("f:x")
    message = (await parsed.chat()).json()["choices"][0]["message"]
    assert message["content"] is None and "reasoning_content" not in message
    assert message["tool_calls"][0]["function"]["arguments"] == "x."


async def test_completions_are_the_text_of_the_model_as_it_is(parsed: Stack) -> None:
    (choice,) = (await parsed.complete()).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "stop")


async def test_log_probabilities_come_with_the_first_piece_of_their_tokens(parsed: Stack) -> None:
    parsed.worker.script = telling(TEXT)
    whole = (await parsed.chat(logprobs=True)).json()["choices"][0]
    listed = [entry["token"] for entry in whole["logprobs"]["content"]]
    assert "".join(listed) == TEXT
    streamed = []
    for event in events_of(await parsed.chat(stream=True, logprobs=True)):
        choices: Any = event["choices"]
        streamed += (choices[0]["logprobs"] or {"content": []})["content"]
    assert [entry["token"] for entry in streamed] == listed
