"""The bundled model with tools and with reasoning, as its chat template has them."""

import json
from functools import cache
from pathlib import Path

import pytest

from tandem.frontend.parsers.formats import reasoning_format_of, tool_format_of
from tandem.models.paths import BUNDLED_MODEL
from tools.tiny_model import train
from tools.tiny_model.evaluate import WEATHER, Chat, Messages, Model, asked, sections, wrong_answers

GOOD_SHARE = 0.9
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@cache
def bundled() -> Model:
    return Model(BUNDLED_MODEL)


def test_its_template_is_the_one_of_its_training_and_shows_both_formats() -> None:
    template = bundled().tokenizer.chat_template
    assert (tool_format_of(template), reasoning_format_of(template)) == ("hermes", "think")
    trained_with = Path(train.__file__).parent / "chat_template.jinja"
    assert template == trained_with.read_text(encoding="utf-8")


def test_it_calls_a_tool_and_answers_from_the_result() -> None:
    question = asked("What is the weather in Rome?")
    function = {"name": "get_weather", "arguments": {"city": "Rome"}}
    result = {"role": "tool", "content": json.dumps({"temperature": 31, "sky": "windy"})}
    call: Messages = [{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]
    first, second, other = bundled().answers(
        [
            Chat(question, functions=[WEATHER]),
            Chat([*question, *call, result], functions=[WEATHER]),
            Chat(asked("What is the capital of France?"), functions=[WEATHER]),
        ]
    )
    assert first == CALL
    assert "windy" in second and "31" in second and "Rome" in second
    assert "Paris" in other and "tool_call" not in other


def test_it_reasons_where_the_template_opens_that() -> None:
    chats = [
        Chat(asked("What is 7 plus 5?")),
        Chat(asked("What is the capital of France?")),
        Chat(asked("What is the weather in Rome?"), functions=[WEATHER]),
    ]
    texts = bundled().answers(chats, enable_thinking=True)
    thoughts, rest = zip(*(text.split("\n</think>\n\n") for text in texts), strict=True)
    assert all(len(thought) > 20 for thought in thoughts)
    assert "12" in rest[0] and "Paris" in rest[1] and rest[2] == CALL


@pytest.mark.slow
def test_nine_in_ten_of_each_part_of_the_evaluation_are_right() -> None:
    for name, chats, variables in sections():
        wrong = wrong_answers(bundled(), chats, variables)
        assert len(wrong) <= (1 - GOOD_SHARE) * len(chats), (name, wrong)
