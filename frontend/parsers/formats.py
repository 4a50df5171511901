"""The output formats of model families, as data: the marks of reasoning and of tool calls.

A call with a `header` is passed on as it grows: its arguments are JSON, or in a `syntax` of XML.
The header is a regular expression from the begin mark to the arguments; that of a syntax has the
mark in it. It is matched again as the text grows, so nothing in it may go back over a run of
characters. Without a header the text between two marks is read as a whole, in a `syntax`.
"""

from typing import Literal

import msgspec

Syntax = Literal["function_xml", "arg_key_xml", "python", "gemma"]


class ReasoningFormat(msgspec.Struct, frozen=True):
    """The marks around reasoning, and those that only order the parts of an answer."""

    begin: str
    end: str
    dropped: tuple[str, ...] = ()
    next: str = ""  # begins the part after the reasoning
    answer: str = ""  # begins the content


class ToolFormat(msgspec.Struct, frozen=True):
    """The syntax of tool calls."""

    begins: dict[str, str]  # mark that begins a call |-> mark that ends it, if there is one
    header: str = ""  # groups: `json_name` or `name`, and `id` where the model makes ids
    is_json: bool = False  # the call is an object with its name; else the name precedes it
    may_be_json: bool = False  # it can be either
    inner: tuple[str, ...] = ()  # marks that the header has
    after: tuple[str, ...] = ()  # follows the arguments, each if it is there
    between: tuple[str, ...] = ()  # follows a call, and another one follows it
    final: tuple[str, ...] = ()  # follows the last call, each if it is there
    dropped: tuple[str, ...] = ()  # marks of the section of calls
    syntax: Syntax | None = None
    bare_begin: str = ""  # characters that begin a call without a mark, at the answer's start
    id_length: int = 0  # of call ids, where templates insist
    # For grammars: the text before the arguments, with the name as %s, and after them.
    call: tuple[str, str] = ("", "")
    repeats: bool = True  # an answer may have several calls
    section: tuple[str, str, str] = ("", "", "")  # text before, between and after the calls


_JSON_HEADER = (
    r'\s*+\[?\s*+\{\s*+"name"\s*+:\s*+(?P<json_name>"(?:[^"\\]|\\.)*")\s*+,\s*+'
    r'"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
)
_JSON_CALL = ('{"name": "%s", "arguments": ', "}")

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(
        {"<tool_call>": "</tool_call>"},
        header=_JSON_HEADER,
        is_json=True,
        after=("}", "]", "</tool_call>"),
        call=('<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>"),
        section=("", "\n", ""),
    ),
    "qwen3_coder": ToolFormat(
        {"<tool_call>": "</tool_call>", "<function=": "</function>"},
        syntax="function_xml",
        header=r"(?:<tool_call>\s*+)?+<function=(?P<name>[^>\n]++)>",
        after=("</tool_call>",),
        call=("<tool_call>\n<function=%s>\n", "</function>\n</tool_call>"),
        section=("", "\n", ""),
    ),
    "llama3_json": ToolFormat(
        {"<|python_tag|>": ""},
        header=_JSON_HEADER,
        is_json=True,
        after=("}",),
        between=(";",),
        bare_begin="{",
        call=('{"name": "%s", "parameters": ', "}"),
        section=("", "; ", ""),
    ),
    "llama_pythonic": ToolFormat(
        {"<|python_start|>": "<|python_end|>"}, syntax="python", bare_begin="["
    ),
    "mistral": ToolFormat(
        {"[TOOL_CALLS]": ""},
        header=_JSON_HEADER
        + r"|\s*+(?P<name>[\w.\-]++)\s*+(?:\[CALL_ID\](?P<id>\w+))?\s*+(?:\[ARGS\])?\s*+(?=\{)",
        after=("}",),
        between=(",",),
        final=("]",),
        may_be_json=True,
        inner=("[CALL_ID]", "[ARGS]"),
        id_length=9,
        call=_JSON_CALL,
        section=("[TOOL_CALLS][", ", ", "]"),
    ),
    "deepseek_v3": ToolFormat(
        {"<｜tool▁call▁begin｜>": "<｜tool▁call▁end｜>"},
        inner=("<｜tool▁sep｜>",),
        header=r"\s*+function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n",
        after=("```", "<｜tool▁call▁end｜>"),
        dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call=(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n",
            "\n```<｜tool▁call▁end｜>",
        ),
        section=("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v31": ToolFormat(
        {"<｜tool▁call▁begin｜>": "<｜tool▁call▁end｜>"},
        inner=("<｜tool▁sep｜>",),
        header=r"\s*+(?P<name>[^\s<]+)<｜tool▁sep｜>",
        after=("<｜tool▁call▁end｜>",),
        dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call=("<｜tool▁call▁begin｜>%s<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        section=("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    ),
    "glm45": ToolFormat(
        {"<tool_call>": "</tool_call>"},
        syntax="arg_key_xml",
        header=r"<tool_call>\s*+(?P<name>[^\s<]++)\s*+(?=<arg_key>|</tool_call>)",
        call=("<tool_call>%s\n", "</tool_call>"),
        section=("", "\n", ""),
    ),
    "kimi_k2": ToolFormat(
        {"<|tool_call_begin|>": "<|tool_call_end|>"},
        header=r"\s*+(?P<id>(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?)"
        r"\s*+<\|tool_call_argument_begin\|>",
        inner=("<|tool_call_argument_begin|>",),
        after=("<|tool_call_end|>",),
        dropped=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call=(
            "<|tool_call_begin|>functions.%s:%d<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        section=("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    ),
    "phi4": ToolFormat(
        {"functools": "", "<|tool_call|>": ""},
        header=_JSON_HEADER,
        is_json=True,
        after=("}",),
        between=(",",),
        final=("]", "<|/tool_call|>"),
        call=_JSON_CALL,
        section=("functools[", ", ", "]"),
    ),
    "gemma3": ToolFormat({"```tool_code": "```"}, syntax="python"),
    "gemma4": ToolFormat({"<|tool_call>": "<tool_call|>"}, syntax="gemma"),
    "function_gemma": ToolFormat(
        {"<start_function_call>": "<end_function_call>"}, syntax="gemma"
    ),
    "harmony": ToolFormat(
        {
            "<|channel|>commentary to=": "<|call|>",
            "<|channel|>analysis to=": "<|call|>",
            "<|start|>assistant to=": "<|call|>",
        },
        header=r"(?:functions\.)?(?P<name>[\w.\-]++)(?:\s*+<\|channel\|>\s*+\w+)?"
        r"\s*+(?:<\|constrain\|>)?\s*+(?:\w+)?\s*+<\|message\|>",
        inner=("<|constrain|>", "<|message|>"),
        after=("<|call|>",),
        call=("<|channel|>commentary to=functions.%s <|constrain|>json<|message|>", ""),
        repeats=False,
    ),
}  # fmt: skip

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>"),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"),
    "harmony": ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        dropped=(
            "<|start|>assistant",
            "<|channel|>final<|message|>",
            "<|channel|>final <|constrain|>json<|message|>",
            "<|channel|>commentary<|message|>",
            "<|end|>",
            "<|return|>",
        ),
        next="<|start|>assistant",
        answer="<|channel|>final<|message|>",
    ),
}

# Texts of a chat template |-> the format that its model was trained on, the first that match. Of
# several texts all have to be there.
_TOOL_SIGNS: list[tuple[tuple[str, ...], str]] = [
    (("<|channel|>", "<|message|>"), "harmony"),
    (("<｜tool▁sep｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁sep｜>",), "deepseek_v31"),
    (("<|tool_call_begin|>",), "kimi_k2"),
    (("<arg_key>",), "glm45"),
    (("<function=",), "qwen3_coder"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call>",), "gemma4"),
    (("<start_function_call>",), "function_gemma"),
    (("<tool_call>",), "hermes"),
    (("functools",), "phi4"),
    (("<|tool_call|>",), "phi4"),
    (("<|python_start|>",), "llama_pythonic"),
    (("[func_name1(",), "llama_pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary',), "llama3_json"),
    (("tool_code",), "gemma3"),
]
_REASONING_SIGNS: list[tuple[tuple[str, ...], str]] = [
    (("<|channel|>", "<|message|>"), "harmony"),
    (("<|channel>",), "gemma4"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed"),
    (("</think>",), "think"),
    (("<think>",), "think"),
]


def tool_format_of(chat_template: str) -> str:
    """Return the name of the format of tool calls that a template shows; "none" for none."""
    return _signed(chat_template, _TOOL_SIGNS)


def reasoning_format_of(chat_template: str) -> str:
    """Return the name of the format of reasoning that a template shows; "none" for none."""
    return _signed(chat_template, _REASONING_SIGNS)


def _signed(chat_template: str, signs: list[tuple[tuple[str, ...], str]]) -> str:
    for texts, name in signs:
        if all(text in chat_template for text in texts):
            return name
    return "none"
