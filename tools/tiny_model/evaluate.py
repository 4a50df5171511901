"""Measures the bundled model: greedy answers to questions whose right answers are known.

python -m tools.tiny_model.evaluate models/tandem-tiny
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.tiny_model.corpus_tables import COUNTRIES
from tools.tiny_model.corpus_talk import unknown_turns
from tools.tiny_model.corpus_tool_uses import draw_use
from tools.tiny_model.corpus_tools import ToolUse
from tools.tiny_model.corpus_words import MEN, WOMEN, Writer

UNSEEN_SEED = 4_000  # of no training
NUM_DRAWN = 100  # uses of tools, and questions beyond the model
_BATCH_CHATS = 50
_MAX_NEW_TOKENS = 110

Messages = list[dict[str, Any]]
Function = dict[str, Any]

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the weather in a city.", "parameters": CITY}


@dataclass(frozen=True, slots=True)
class Chat:
    """The messages and functions that a client sends, and the test of the model's answer."""

    messages: Messages
    is_right: Callable[[str], bool] = bool
    functions: Sequence[Function] = ()


def asked(question: str) -> Messages:
    """Return a conversation that is one question."""
    return [{"role": "user", "content": question}]


def function_of(use: ToolUse) -> Function:
    """Return the tool of a use, as a client sends it."""
    properties = {name: {"type": kind} for name, kind in use.tool.parameters.items()}
    return {
        "name": use.tool.name,
        "description": use.tool.description,
        "parameters": {"type": "object", "properties": properties},
    }


def called(use: ToolUse) -> Messages:
    """Return the conversation of a use up to the result of the tool."""
    function = {"name": use.tool.name, "arguments": use.arguments}
    return [
        *asked(use.question),
        {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
        {"role": "tool", "content": use.result},
    ]


class Model:
    """A model folder in transformers, in float32."""

    def __init__(self, folder: Path) -> None:
        self.network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def answers(self, chats: Sequence[Chat], **variables: Any) -> list[str]:
        """Return the greedy answers; `variables` are those of the chat template."""
        return [
            answer
            for begin in range(0, len(chats), _BATCH_CHATS)
            for answer in self._batch(chats[begin : begin + _BATCH_CHATS], variables)
        ]

    def _batch(self, chats: Sequence[Chat], variables: dict[str, Any]) -> Iterator[str]:
        prompts = [
            self.tokenizer.apply_chat_template(
                chat.messages,
                tools=[{"type": "function", "function": each} for each in chat.functions] or None,
                add_generation_prompt=True,
                tokenize=False,
                **variables,
            )
            for chat in chats
        ]
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        inputs.pop("token_type_ids", None)
        with torch.inference_mode():
            output = self.network.generate(
                **inputs, max_new_tokens=_MAX_NEW_TOKENS, do_sample=False
            )
        for ids in output[:, inputs["input_ids"].shape[1] :]:
            yield self.tokenizer.decode(ids, skip_special_tokens=True)


def _capitals(*functions: Function) -> list[Chat]:
    return [
        Chat(asked(f"What is the capital of {country}?"), _answers_with(capital), functions)
        for country, (capital, *_) in COUNTRIES.items()
    ]


def _sums(*functions: Function) -> list[Chat]:
    return [
        Chat(asked(f"What is {a} plus {b}?"), _answers_with(f" {a + b}."), functions)
        for a in range(11)
        for b in range(11)
    ]


def _answers_with(word: str) -> Callable[[str], bool]:
    """Return the test of an answer with a word, which reasoning alone does not pass."""
    return lambda text: word in text.rpartition("</think>")[2]


def _names() -> list[Chat]:
    between: Messages = [
        *asked("What is the capital of Spain?"),
        {"role": "assistant", "content": "The capital of Spain is Madrid."},
    ]
    return [
        Chat(
            [
                *asked(f"My name is {name}."),
                {"role": "assistant", "content": f"Hello, {name}! How can I help you?"},
                *between,
                *asked("What is my name?"),
            ],
            _answers_with(name),
        )
        for name in WOMEN + MEN
    ]


def _beyond() -> list[Chat]:
    writer = Writer(UNSEEN_SEED)
    questions = [unknown_turns(writer)[0][0] for _ in range(NUM_DRAWN)]
    return [Chat(asked(question), _answers_with("do not know")) for question in questions]


def _uses(messages_of: Callable[[ToolUse], Messages], wanted: str) -> list[Chat]:
    writer = Writer(UNSEEN_SEED)
    uses = [draw_use(writer) for _ in range(NUM_DRAWN)]
    return [Chat(messages_of(use), getattr(use, wanted).__eq__, [function_of(use)]) for use in uses]


def sections() -> Iterator[tuple[str, list[Chat], dict[str, Any]]]:
    """The name, the chats and the template's variables of each part of the evaluation."""
    for name, chats in (("capitals", _capitals), ("sums to 10 plus 10", _sums)):
        yield name, chats(), {}
        yield f"{name}, reasoning", chats(), {"enable_thinking": True}
        yield f"{name}, beside a tool", chats(WEATHER), {}
    yield "a name, over a turn", _names(), {}
    yield "questions beyond it, declined", _beyond(), {}
    yield "calls of unseen tools", _uses(lambda use: asked(use.question), "call"), {}
    yield "answers from unseen results", _uses(called, "answer"), {}


def wrong_answers(model: Model, chats: list[Chat], variables: dict[str, Any]) -> list[str]:
    """Return the answers that are not right, each behind its question."""
    pairs = zip(chats, model.answers(chats, **variables), strict=True)
    return [
        f"{chat.messages[-1]['content']!r}: {text!r}"
        for chat, text in pairs
        if not chat.is_right(text)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.tiny_model.evaluate")
    parser.add_argument("model", type=Path, help="the folder of the model")
    parser.add_argument("--verbose", action="store_true", help="print the wrong answers too")
    options = parser.parse_args(argv)
    model = Model(options.model)
    print("| part | right |\n|---|---|")
    for name, chats, variables in sections():
        wrong = wrong_answers(model, chats, variables)
        print(f"| {name} | {len(chats) - len(wrong)} of {len(chats)} |")
        if options.verbose:
            print("\n".join(wrong))


if __name__ == "__main__":
    main()
