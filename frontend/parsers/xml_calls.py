"""The arguments of a call in a format of XML, as JSON that grows with the text of the call.

Strings go out as they are written. A text within an argument may look like an end tag, so a tag
only ends an argument where the next argument or the end of the call follows it.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.frontend.parsers.argument_types import Allowed, ArgumentTypes, value_of
from tandem.frontend.parsers.marks import Marks

_Chains = tuple[tuple[str, ...], ...]


class XmlTags(msgspec.Struct, frozen=True):
    """The tags of the arguments. Between those of one chain there may be white space."""

    key: re.Pattern[str]  # from the beginning of an argument to its value
    key_begin: str
    ends: dict[str, _Chains]  # tag that ends a value |-> chains, one of which has to follow it
    closes: tuple[str, ...]  # tags that end the call, after the last argument
    breaks: bool = False  # a line break before and after a value is not part of it


MAX_KEY_CHARS = 4096  # what is longer is no name
MAX_SPACE_CHARS = 4096  # between tags; what stands further apart is no chain
_MAX_OPEN_CHARS = MAX_KEY_CHARS + MAX_SPACE_CHARS + 64  # an argument up to its value, with tags
_PARAMETER = re.compile(rf"<parameter=([^>\n]{{1,{MAX_KEY_CHARS}}}+)>")
_OUTER_XML = XmlTags(
    _PARAMETER,
    "<parameter=",
    {
        "</parameter>": (
            ("<parameter=",),
            ("</function>", "</tool_call>"),
            ("</function>", "<tool_call>"),  # a forgotten end
        ),
        "</function>": (("</tool_call>",),),
    },
    ("</function>", "</tool_call>"),
    breaks=True,
)
_BARE_XML = XmlTags(
    _PARAMETER,
    "<parameter=",
    {"</parameter>": (("<parameter=",), ("</function>",))},
    ("</function>",),
    breaks=True,
)
_ARG_KEYS = XmlTags(
    re.compile(
        rf"<arg_key>([^<]{{0,{MAX_KEY_CHARS}}}+)</arg_key>\s{{0,{MAX_SPACE_CHARS}}}+<arg_value>"
    ),
    "<arg_key>",
    {"</arg_value>": (("<arg_key>",), ("</tool_call>",))},
    ("</tool_call>",),
)


def xml_tags(name: str, mark: str) -> XmlTags:
    """Return the tags of a syntax, in a call that began with `mark`."""
    if name == "arg_key_xml":
        return _ARG_KEYS
    return _OUTER_XML if mark == "<tool_call>" else _BARE_XML


class XmlArguments:
    """Reads the text of one call behind its name. `rest` is the text after it, once it is whole."""

    def __init__(self, tags: XmlTags, schema: Mapping[str, Any]) -> None:
        self._tags = tags
        self._types = ArgumentTypes(schema)
        self._ends = Marks(tags.ends)
        self._text = ""
        self._json: list[str] = []  # not returned yet
        self._num_arguments = 0
        self._allowed: Allowed | None = None  # of the value that is being read
        self._has_begun = False  # the value: the line break before it is dropped
        self._held: list[str] | None = None  # the value so far; None: it goes out as a string
        self._is_end = False
        self.is_whole = False

    @property
    def rest(self) -> str:
        """The text behind the call."""
        return self._text

    def push(self, text: str) -> str:
        """Return the JSON that more text completes."""
        self._text += text
        while not self.is_whole and (self._between() if self._allowed is None else self._value()):
            pass
        parts, self._json = self._json, []
        return "".join(parts)

    def finish(self) -> str:
        """Return the last JSON. It has no end where the text ended within a value."""
        self._is_end = True
        return self.push("")

    def _between(self) -> bool:
        """Read the beginning of an argument, or the end of the call. Drops any other text."""
        text = self._text = self._text.lstrip()
        for tag in self._tags.closes:
            if text.startswith(tag):
                return self._close(len(tag))
        if (found := self._tags.key.match(text)) is not None:
            return self._open_value(found)
        if self._is_end:
            return self._close(len(text))
        tags = (self._tags.key_begin, *self._tags.closes)
        is_open = text.startswith(tags[0]) and len(text) <= _MAX_OPEN_CHARS
        is_open = is_open and not any(tag in text for tag in tags[1:])
        if is_open or any(tag.startswith(text) for tag in tags):
            return False
        next_tag = text.find("<", 1)
        self._text = text[next_tag:] if next_tag > 0 else ""
        return bool(self._text)

    def _close(self, length: int) -> bool:
        self._json.append("}" if self._num_arguments else "{}")
        self._text = self._text[length:]
        self.is_whole = True
        return False

    def _open_value(self, found: re.Match[str]) -> bool:
        name = found[1].strip()
        self._text = self._text[found.end() :]
        self._allowed = self._types.of(name)
        self._has_begun = not self._tags.breaks
        before = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        begin = f"{before}{json.dumps(name, ensure_ascii=False)}: "
        if self._allowed.is_text and not self._allowed.takes(None):
            begin, self._held = begin + '"', None
        else:
            self._held = []
        self._json.append(begin)
        return True

    def _value(self) -> bool:
        """Read more of a value, up to its end."""
        if not self._has_begun:
            if not self._text:
                return False
            self._text = self._text.removeprefix("\n")
            self._has_begun = True
        text, start = self._text, 0
        while True:
            place, tag = self._ends.find(text[start:], is_end=self._is_end)
            place += start
            follows = None if tag is None else self._follows(text[place + len(tag) :], tag)
            if tag is None or follows is not False:
                break
            start = place + len(tag)
        num_kept = place - (self._tags.breaks and text[:place].endswith("\n"))
        if tag is not None and follows:
            self._end_value(text[:num_kept])
            self._text = text[place + (0 if tag in self._tags.closes else len(tag)) :]
            return True
        num_kept = len(text) if self._is_end else num_kept
        self._add(text[:num_kept])
        self._text = text[num_kept:]
        return False

    def _follows(self, text: str, tag: str) -> bool | None:
        """Return True if the tag before `text` ends a value; None where more text decides."""
        answers = [_has_chain(text, chain, self._is_end) for chain in self._tags.ends[tag]]
        return True if True in answers else None if None in answers else False

    def _add(self, text: str) -> None:
        """Add text to the value. One that cannot be null any more goes out."""
        if self._held is None:
            self._json.append(_escaped(text))
            return
        self._held.append(text)
        assert self._allowed is not None
        if self._allowed.is_text and not "null".startswith("".join(self._held).strip()):
            self._json.append('"' + _escaped("".join(self._held)))
            self._held = None

    def _end_value(self, text: str) -> None:
        assert self._allowed is not None
        self._add(text)
        if self._held is None:
            self._json.append('"')
        else:
            value = value_of("".join(self._held), self._allowed)
            self._json.append(json.dumps(value, ensure_ascii=False))
        self._allowed = self._held = None


def _has_chain(text: str, chain: tuple[str, ...], is_end: bool) -> bool | None:
    """Return True if `text` begins with a chain of tags, at its end with a part of it.

    None where more text decides.
    """
    for tag in chain:
        num_chars = len(text)
        text = text.lstrip()
        if num_chars - len(text) > MAX_SPACE_CHARS:
            return False
        if not text.startswith(tag):
            if is_end:
                return not text
            return None if tag.startswith(text) else False
        text = text[len(tag) :]
    return True


def _escaped(text: str) -> str:
    """Return text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
