"""Answers of model families, and the pieces that they are read as, beside `shared_cases`."""

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """An answer in the formats of its model; the arguments of calls are compared as JSON."""

    tools: str
    reasoning: str
    text: str
    content: str = ""
    thoughts: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    starts_reasoning: bool = False


A = {"city": "Paris"}
B = {"city": "東京", "days": 3, "deep": {"x": [1, {"y": "}"}], "q": 'a"\\b'}}
TA, TB = json.dumps(A), json.dumps(B, ensure_ascii=False, indent=1)
W = "weather"


def hermes(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{W}", "arguments": {arguments}}}\n</tool_call>'


def v3(arguments: str) -> str:
    begin = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{W}"
    return f"{begin}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


XML = "<tool_call>\n<function=weather>\n<parameter=city>\nPa\nris <b>\n</parameter>\n"
XML += '<parameter=days>\n3\n</parameter>\n<parameter=deep>\n{"a": [true]}\n</parameter>\n'
XML += "</function>\n</tool_call>"
GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
GLM += "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
SCHEMAS = {W: {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {}}}}
V3_BEGIN, V3_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ANALYSIS = "<|channel|>analysis<|message|>I look.<|end|>"

CASES: dict[str, Case] = {
    "hermes: no arguments": Case(
        "hermes", "think", '<tool_call>{"name": "now"}</tool_call>', calls=[("now", {})]
    ),
    "hermes: arguments first": Case(
        "hermes", "think", f'<tool_call>{{"arguments": {TB}, "name": "{W}"}}</tool_call>',
        calls=[(W, B)],
    ),
    "hermes: arguments are a string": Case(
        "hermes", "think",
        f'<tool_call>{{"name": "{W}", "arguments": {json.dumps(TA)}}}</tool_call>',
        calls=[(W, A)],
    ),
    "hermes: the mark within an argument": Case(
        "hermes", "think", hermes('{"x": "</tool_call> <tool_call>"}'),
        calls=[(W, {"x": "</tool_call> <tool_call>"})],
    ),
    "hermes: a closing brace is missing": Case(
        "hermes", "think", f'<tool_call>{{"name": "{W}", "arguments": {TA}</tool_call>!', "!",
        calls=[(W, A)],
    ),
    "hermes: no JSON": Case(
        "hermes", "think", "a <tool_call>weather(Paris)</tool_call> b",
        "a <tool_call>weather(Paris)</tool_call> b",
    ),
    "hermes: JSON that is no call": Case(
        "hermes", "think", 'a <tool_call>{"x": 1}</tool_call>', 'a <tool_call>{"x": 1}</tool_call>'
    ),
    "hermes: cut before the name": Case(
        "hermes", "think", 'a <tool_call>\n{"na', 'a <tool_call>\n{"na'
    ),
    "hermes: cut within the mark": Case("hermes", "think", "a <tool_ca", "a <tool_ca"),
    "hermes: no mark": Case("hermes", "think", "1 < 2, <b>, <tool>", "1 < 2, <b>, <tool>"),
    "hermes: a list": Case(
        "hermes", "think", f'<tool_call>[{{"name": "{W}", "arguments": {TA}}}]</tool_call>',
        calls=[(W, A)],
    ),
    "think: then an answer": Case(
        "hermes", "think", "<think>\nWell <b>.\n</think>\n\nHi", "Hi", "Well <b>."
    ),
    "think: then a call": Case(
        "hermes", "think", f"<think>Well.</think>\n{hermes(TA)}", thoughts="Well.", calls=[(W, A)]
    ),
    "think: begun by the prompt": Case(
        "hermes", "think", "Well.\n\nSo.</think>Hi", "Hi", "Well.\n\nSo.", starts_reasoning=True
    ),
    "think: begun by the prompt and again": Case(
        "hermes", "think", "<think>\nWell.</think>Hi", "Hi", "Well.", starts_reasoning=True
    ),
    "think: cut": Case("hermes", "think", "<think>Well. </thi", thoughts="Well. </thi"),
    "think: no end of it": Case(
        "none", "think", "Well, <tool_call>", thoughts="Well, <tool_call>", starts_reasoning=True
    ),
    "think: calls are thoughts": Case(
        "hermes", "think", f"<think>{hermes(TA)}</think>Hi", "Hi", hermes(TA)
    ),
    "qwen3-coder: typed by the schema": Case(
        "qwen3_coder", "none", f"I look.\n\n{XML}", "I look.\n\n",
        calls=[(W, {"city": "Pa\nris <b>", "days": 3, "deep": {"a": [True]}})],
    ),
    "qwen3-coder: cut": Case("qwen3_coder", "none", XML[:20], XML[:20]),
    "llama: an answer in JSON": Case(
        "llama3_json", "none", ' {"name": "Ann", "age": 3} x', ' {"name": "Ann", "age": 3} x'
    ),
    "llama: braces without JSON": Case(
        "llama3_json", "none", "{x} is a set", "{x} is a set"
    ),
    "llama: an answer": Case("llama3_json", "none", "Use {x}.", "Use {x}."),
    "llama: pythonic": Case(
        "llama_pythonic", "none", '[weather(city="Paris"), a.b(x=[1, True, None], y={"k": -2})]',
        calls=[(W, A), ("a.b", {"x": [1, True, None], "y": {"k": -2}})],
    ),
    "llama: pythonic between marks": Case(
        "llama_pythonic", "none", 'I look. <|python_start|>[now()]<|python_end|>', "I look. ",
        calls=[("now", {})],
    ),
    "llama: pythonic that is none": Case(
        "llama_pythonic", "none", "[1, 2] is a list", "[1, 2] is a list"
    ),
    "llama: pythonic that runs": Case(
        "llama_pythonic", "none", '[f(x=open("y"))]', '[f(x=open("y"))]'
    ),
    "mistral: names": Case(
        "mistral", "mistral", f"[TOOL_CALLS]{W}[CALL_ID]123456789[ARGS]{TA}[TOOL_CALLS]{W}{TB}",
        calls=[(W, A), (W, B)],
    ),
    "mistral: thoughts": Case(
        "mistral", "mistral", "[THINK]Well [x].[/THINK]Hi [1]", "Hi [1]", "Well [x]."
    ),
    "deepseek r1: thoughts and a call": Case(
        "deepseek_v3", "think", f"Well.\n</think>\n\n{V3_BEGIN}{v3(TA)}{V3_END}", "", "Well.",
        calls=[(W, A)], starts_reasoning=True,
    ),
    "deepseek v3: no call": Case(
        "deepseek_v3", "think", "<｜tool▁call▁begin｜>x<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>x<｜tool▁call▁end｜>",
    ),
    "deepseek v3.1": Case(
        "deepseek_v31", "think",
        f"{V3_BEGIN}<｜tool▁call▁begin｜>{W}<｜tool▁sep｜>{TB}<｜tool▁call▁end｜>{V3_END}",
        calls=[(W, B)],
    ),
    "glm": Case(
        "glm45", "think", f"<think></think>\n{GLM}", calls=[(W, {"city": "Paris", "days": 3})]
    ),
    "phi4: functools": Case(
        "phi4", "none", f'functools[{{"name": "{W}", "arguments": {TA}}}]', calls=[(W, A)]
    ),
    "phi4: marks": Case(
        "phi4", "none",
        f'<|tool_call|>[{{"name": "{W}", "arguments": {TA}}}, '
        f'{{"name": "{W}", "arguments": {TB}}}]<|/tool_call|>',
        calls=[(W, A), (W, B)],
    ),
    "phi4: the word": Case("phi4", "none", "functools is a module", "functools is a module"),
    "gemma3": Case(
        "gemma3", "none", 'I look.\n```tool_code\nweather(city="Paris")\n```', "I look.\n",
        calls=[(W, A)],
    ),
    "gemma4": Case(
        "gemma4", "gemma4",
        '<|channel>thought\nWell.<channel|><|tool_call>call:weather{city:<|"|>Paris<|"|>}'
        "<tool_call|>",
        thoughts="Well.", calls=[(W, A)],
    ),
    "gemma: functions": Case(
        "function_gemma", "none",
        "<start_function_call>call:weather{city:<escape>Pa: ris<escape>,n:[1,true]}"
        "<end_function_call>",
        calls=[(W, {"city": "Pa: ris", "n": [1, True]})],
    ),
    "harmony: an answer": Case(
        "harmony", "harmony", f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Hi",
        "Hi", "I look.",
    ),
    "harmony: a call": Case(
        "harmony", "harmony",
        f"{ANALYSIS}<|start|>assistant<|channel|>commentary to=functions.{W} <|constrain|>json"
        f"<|message|>{TB}<|call|>",
        "", "I look.", calls=[(W, B)],
    ),
    "harmony: a call by the role": Case(
        "harmony", "harmony",
        f"{ANALYSIS}<|start|>assistant to=functions.{W}<|channel|>commentary json<|message|>{TA}",
        "", "I look.", calls=[(W, A)],
    ),
    "harmony: a preamble": Case(
        "harmony", "harmony",
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>final"
        "<|message|>Hi",
        "First.Hi",
    ),
}  # fmt: skip
