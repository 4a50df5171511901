"""Calls whose arguments are not JSON: the whole text of a call to its name and arguments."""

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tandem.frontend.parsers.formats import Syntax

ReadCall = tuple[str, str]  # name, arguments as JSON
Schemas = Mapping[str, Mapping[str, Any]]  # function |-> JSON schema of its arguments
_MAX_PYTHON_CHARACTERS = 64 * 1024  # its parser keeps everything else waiting
_PARAMETER = re.compile(
    r"<parameter=([^>]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=|</function>)|\Z)", re.DOTALL
)
_FUNCTION = re.compile(r"\s*(?:<tool_call>)?\s*<function=([^>\n]+)>(.*)", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_ARG_KEY_CALL = re.compile(r"\s*<tool_call>\s*([^\s<]+)\s*(.*?)\s*</tool_call>", re.DOTALL)
_GEMMA_CALL = re.compile(r"\s*call:([\w.\-]+)\s*(\{.*\})\s*", re.DOTALL)
_GEMMA_QUOTES = re.compile(r'<\|"\|>|<escape>')
_BARE_KEY = re.compile(r"([A-Za-z_][\w.\-]*)\s*:")


def read_calls(
    syntax: Syntax, text: str, marks: tuple[str, str], schemas: Schemas
) -> list[ReadCall]:
    """Return the calls in the text from one mark to the other; none if it does not parse."""
    begin, end = marks
    body = text.removeprefix(begin).removesuffix(end)
    try:
        return _READERS[syntax](text, body, schemas)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []


def _function_xml(text: str, body: str, schemas: Schemas) -> list[ReadCall]:
    found = _FUNCTION.match(text)
    if found is None:
        return []
    return [_typed(found[1].strip(), _PARAMETER.findall(found[2]), schemas)]


def _arg_key_xml(text: str, body: str, schemas: Schemas) -> list[ReadCall]:
    found = _ARG_KEY_CALL.fullmatch(text)
    if found is None or _ARGUMENT.sub("", found[2]).strip():
        return []
    return [_typed(found[1], _ARGUMENT.findall(found[2]), schemas)]


def _typed(name: str, arguments: list[tuple[str, str]], schemas: Schemas) -> ReadCall:
    """Return a call whose arguments are text: JSON where the schema wants no string."""
    properties = schemas.get(name, {}).get("properties")
    properties = properties if isinstance(properties, dict) else {}
    values = {key.strip(): _value(text, properties.get(key.strip())) for key, text in arguments}
    return name, json.dumps(values, ensure_ascii=False)


def _value(text: str, schema: object) -> Any:
    if not isinstance(schema, dict) or is_text(schema):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def is_text(schema: Mapping[str, Any]) -> bool:
    """Return True if a value of this schema is a string, which stands without quotes."""
    if "enum" in schema and isinstance(schema["enum"], list):
        return all(isinstance(value, str) for value in schema["enum"])
    return schema.get("type") == "string"


def _python(text: str, body: str, schemas: Schemas) -> list[ReadCall]:
    if len(body) > _MAX_PYTHON_CHARACTERS:
        return []
    calls: list[ReadCall] = []
    for statement in ast.parse(body.strip()).body:
        if not isinstance(statement, ast.Expr):
            return []
        value = statement.value
        for each in value.elts if isinstance(value, ast.List) else [value]:
            if not isinstance(each, ast.Call) or each.args:
                return []
            arguments = {str(word.arg): ast.literal_eval(word.value) for word in each.keywords}
            calls.append((ast.unparse(each.func), _dump(arguments)))
    return calls


def _gemma(text: str, body: str, schemas: Schemas) -> list[ReadCall]:
    found = _GEMMA_CALL.fullmatch(body)
    if found is None:
        return []
    parts = _GEMMA_QUOTES.split(found[2])
    parts[::2] = [_BARE_KEY.sub(r'"\1":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return [(found[1], _dump(json.loads("".join(parts))))]


def _dump(arguments: dict[str, Any]) -> str:
    """Return JSON. Raises ValueError for values that JSON does not have."""
    try:
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(str(error)) from error


_READERS: dict[Syntax, Callable[[str, str, Schemas], list[ReadCall]]] = {
    "function_xml": _function_xml,
    "arg_key_xml": _arg_key_xml,
    "python": _python,
    "gemma": _gemma,
}
