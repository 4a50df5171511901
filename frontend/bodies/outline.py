"""The outline of a body: its fields as JSON, checked before any object is made of them.

Two bytes of JSON can become an object of hundreds, and nothing else runs while objects are made.
"""

import re
from typing import ClassVar

import msgspec

from tandem.frontend.bodies.invalid import invalid_field
from tandem.runtime.errors import ContextLengthError, InvalidRequestError

MAX_FIELDS = 64  # of a body, and of a message
MAX_FIELD_BYTES = 64 * 1024  # of a field of a body, other than messages, prompt and tools
MAX_MESSAGES = 2048
MAX_CONTENT_PARTS = 4096  # of all messages of a body
MAX_TOOLS = 256
MAX_TOOLS_BYTES = 1024 * 1024
MAX_PROMPT_TOKENS = 2**20  # that a body has as token ids
_SMALL_LIST_BYTES = 64 * 1024  # of a list, whose entries are never so many that they take long
_SMALL_BYTES = 4096  # of a prompt, whose objects take less than a millisecond

Fields = dict[str, msgspec.Raw]
PROMPT_FORMS = (
    "`{}` must be a string, a list of strings, a list of token ids or a list of lists of token ids"
)
_BOM = b"\xef\xbb\xbf"
_NO_NUMBER = re.compile(rb'"([^"\\]{1,64})"\s*:[\s\[]*-?(NaN|Infinity)')
decode_fields = msgspec.json.Decoder(Fields).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_prompts = msgspec.json.Decoder(list[int | str | list[int]]).decode


def read_fields(raw: bytes) -> Fields:
    """Return the fields of a body, as JSON. Raises InvalidRequestError if it is no JSON object."""
    if raw.startswith(_BOM):
        raise InvalidRequestError("the body begins with a byte order mark; send JSON without it")
    try:
        fields = decode_fields(raw)
    except msgspec.ValidationError as error:
        raise InvalidRequestError("the body must be a JSON object") from error
    except RecursionError as error:
        raise InvalidRequestError("the body is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(raw, error) from error
    check_num_fields(fields)
    return fields


def check_num_fields(fields: Fields, where: str = "") -> None:
    """Raise InvalidRequestError for an object with too many fields; `where` is its path."""
    if len(fields) > MAX_FIELDS:
        name = f"`{where}`" if where else "the body"
        raise InvalidRequestError(
            f"{name} has {len(fields)} fields, the most is {MAX_FIELDS}", param=where or None
        )


def _not_json(raw: bytes, error: Exception) -> InvalidRequestError:
    """Return the error of a body that is not JSON. NaN and Infinity are named with their field."""
    position = re.search(r"byte (\d+)", str(error))
    end = int(position[1]) + 16 if position else 0
    found = _NO_NUMBER.search(raw, max(0, end - 128), end)
    if found is None:
        return InvalidRequestError(f"the body is not JSON: {error}")
    field, value = (each.decode("utf-8", "replace") for each in found.groups())
    return invalid_field(field, f"is {value}, which JSON does not have")


class _Counted(msgspec.Struct):
    """An object of a list. One beyond the most ends the decoding, which takes long otherwise."""

    num_left: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _Counted.num_left -= 1
        if _Counted.num_left < 0:
            raise ValueError


_decode_counted = msgspec.json.Decoder(list[_Counted]).decode


def read_list(raw: bytes | msgspec.Raw, most: int, where: str, least: int = 0) -> list[msgspec.Raw]:
    """Return the objects of a list. Raises InvalidRequestError naming it, or a wrong entry."""
    if not begins(raw, b"["):
        raise invalid_field(where, "must be a list")
    if len(raw) > _SMALL_LIST_BYTES:
        _Counted.num_left = most
        try:
            _decode_counted(raw)
        except msgspec.ValidationError as error:
            if _Counted.num_left < 0:
                raise _wrong_length(where, f"over {most}", most, least) from error
            wrong = f"{where}[{most - _Counted.num_left}]"
            raise invalid_field(wrong, "must be an object") from error
    items = _decode_list(raw)
    if not least <= len(items) <= most:
        raise _wrong_length(where, str(len(items)), most, least)
    return items


def _wrong_length(where: str, num: str, most: int, least: int) -> InvalidRequestError:
    bounds = f"the most is {most}" if least == 0 else f"it must have {least} to {most}"
    return invalid_field(where, f"has {num} entries; {bounds}")


def read_messages(raw: msgspec.Raw) -> list[Fields]:
    """Return the fields of every message. Raises InvalidRequestError naming a wrong one."""
    items = read_list(raw, MAX_MESSAGES, "messages", 1)
    return [_read_message(item, f"messages[{index}]") for index, item in enumerate(items)]


def _read_message(raw: msgspec.Raw, where: str) -> Fields:
    if not begins(raw, b"{"):
        raise invalid_field(where, "must be an object")
    fields = decode_fields(raw)
    check_num_fields(fields, where)
    return fields


def check_lists(fields: Fields, max_prompts: int, longest_context: int) -> None:
    """Raise InvalidRequestError naming a list of a body that is longer than its bound.

    `longest_context` is the most tokens of a prompt that any model takes.
    """
    for name in ("tools", "functions"):
        tools = fields.get(name)
        if tools is not None and begins(tools, b"["):
            list_of_tools(tools, name)
    messages, prompt = fields.get("messages"), fields.get("prompt")
    if messages is not None and not is_null(messages):
        _check_messages(messages)
    if prompt is not None and not is_null(prompt):
        check_prompts(prompt, max_prompts, longest_context)


def check_size(name: str, value: msgspec.Raw) -> None:
    """Raise InvalidRequestError for a field that is larger than its bound."""
    most = MAX_TOOLS_BYTES if name in ("tools", "functions") else MAX_FIELD_BYTES
    if len(value) > most:
        raise invalid_field(name, f"has {len(value)} bytes, the most is {most}")


def _check_messages(raw: msgspec.Raw) -> None:
    num_parts = 0
    for index, message in enumerate(read_messages(raw)):
        for name in ("content", "tool_calls"):
            parts = message.get(name)
            if parts is not None and begins(parts, b"["):
                num_parts += len(read_list(parts, MAX_CONTENT_PARTS, f"messages[{index}].{name}"))
    if num_parts > MAX_CONTENT_PARTS:
        raise invalid_field(
            "messages",
            f"has {num_parts} content parts and tool calls, the most is {MAX_CONTENT_PARTS}",
        )


def list_of_tools(raw: msgspec.Raw, where: str) -> list[msgspec.Raw]:
    """Return the tools of a list. Raises InvalidRequestError for too many or too large ones."""
    if is_null(raw):
        return []
    raws = read_list(raw, MAX_TOOLS, where)
    for index, each in enumerate(raws):
        if len(each) > MAX_FIELD_BYTES:
            field = f"{where}[{index}]"
            raise invalid_field(field, f"has {len(each)} bytes, the most is {MAX_FIELD_BYTES}")
    return raws


def check_prompts(
    raw: msgspec.Raw, max_prompts: int, longest_context: int, name: str = "prompt"
) -> None:
    """Raise InvalidRequestError naming the field of texts, or of tokens, that has too many."""
    if begins(raw, b'"'):
        return
    if len(raw) > _SMALL_BYTES:
        _check_num_items(bytes(raw), max_prompts, longest_context, name)
    try:
        prompts = _decode_prompts(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(PROMPT_FORMS.format(name), param=name) from error
    if len(raw) > _SMALL_BYTES:
        longest = max((len(each) for each in prompts if isinstance(each, list)), default=0)
        _check_num_tokens(longest, longest_context, name)


def _check_num_items(raw: bytes, max_prompts: int, longest_context: int, name: str) -> None:
    """Count the prompts, or the tokens of the only one, before any object is made of them."""
    most_items = raw.count(b",") + 1
    has_texts, num_lists = b'"' in raw, raw.count(b"[") - 1
    num_prompts = len(_decode_list(raw)) if has_texts and most_items > max_prompts else num_lists
    if num_prompts > max_prompts:
        asked = "asks for {} choices" if name == "prompt" else "has {} entries"
        raise invalid_field(name, f"{asked.format(num_prompts)}, the most is {max_prompts}")
    if not has_texts:
        _check_num_tokens(most_items, MAX_PROMPT_TOKENS if num_lists > 0 else longest_context, name)


def _check_num_tokens(num_tokens: int, most: int, name: str) -> None:
    if num_tokens > most:
        raise ContextLengthError(
            f"`{name}` has {num_tokens} tokens, the most is {most}", param=name
        )


def is_null(value: msgspec.Raw) -> bool:
    """Return True for `null`, which is the same as no field."""
    return len(value) == 4 and bytes(value) == b"null"


def begins(value: bytes | msgspec.Raw, character: bytes) -> bool:
    """Return True if the JSON of a value begins with `character`, which says its type."""
    return memoryview(value)[:1] == character
