"""The parser of all output formats: from growing text to pieces of an answer.

Every decision depends on the text alone, so that the joined pieces are the same for every split of
it. Text that looks like a call and is none comes back as content. White space around marks is
dropped.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from tandem.frontend.parsers.json_calls import object_calls, unquoted
from tandem.frontend.parsers.json_end import JsonEnd
from tandem.frontend.parsers.output_format import OutputFormat
from tandem.frontend.parsers.pieces import Content, Piece, Reasoning, ToolCallDelta
from tandem.frontend.parsers.python_end import PythonEnd
from tandem.frontend.parsers.syntaxes import ReadCall, read_calls
from tandem.frontend.parsers.xml_calls import XmlArguments, xml_tags
from tandem.runtime.address import new_id

_MAX_HEADER = 1024  # characters up to the arguments; none that is longer is looked for
Schemas = Mapping[str, Mapping[str, Any]]  # function |-> JSON schema of its arguments


class StreamingParser:
    """Parser of one choice. `max_calls` makes the text of further calls content.

    `only_calls` says that the text can be nothing but calls after the reasoning.
    """

    def __init__(
        self,
        format: OutputFormat,
        *,
        starts_reasoning: bool = False,
        schemas: Schemas | None = None,
        max_calls: int | None = None,
        only_calls: bool = False,
    ) -> None:
        self._format = format
        self._tools = format.tools
        self._schemas = schemas or {}
        self._max_calls = max_calls
        self._only_calls = only_calls
        self._buffer = ""
        self._is_end = False
        self._pieces: list[Piece] = []
        self._num_calls = 0
        self._trims = False  # white space before the next content is dropped
        self._has_reasoned = False
        self._space = ""  # white space that may end the reasoning
        self._mark = ""  # that began the call
        self._json = JsonEnd()
        self._python = PythonEnd()
        self._num_read = 0  # characters of the buffer that need no second look
        self._has_arguments = False
        self._literal = 0  # the next one after a call
        self._state = self._reasoning if starts_reasoning else self._answer()

    def push(self, text: str) -> list[Piece]:
        is_plain = not self._buffer and not self._trims and self._state == self._content
        if is_plain and not self._format.marks.may_begin_in(text):
            return [Content(text)]  # nearly always
        self._buffer += text
        return self._run()

    @property
    def is_in_call(self) -> bool:
        if self._state == self._arguments:
            return not self._json.is_whole
        return self._state == self._xml_arguments

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        if is_cut and self._state != self._reasoning and self._may_be_call:
            self._buffer = ""
            return []
        self._is_end = True
        return self._run()

    @property
    def _may_be_call(self) -> bool:
        """True if the text held back can only be the beginning of a call."""
        if self._only_calls or self._state in (self._xml_arguments, self._after, self._last):
            return True
        if self._state == self._content:
            return self._num_calls > 0 and self._trims  # nothing has followed the last call
        return self._state == self._call and bool(self._mark)

    def _run(self) -> list[Piece]:
        self._pieces = []
        while self._state():
            pass
        return self._pieces

    # ---- states: each takes from the buffer, and returns True if another one may go on ---------

    def _answer(self) -> Callable[[], bool]:
        """Return the state at the start of the answer."""
        return self._start if self._tools.bare_begin else self._content

    def _start(self) -> bool:
        """Tell a call without a mark from content by the first character."""
        text = self._buffer.lstrip()
        if not text and not self._is_end:
            return False
        if text and text[0] in self._tools.bare_begin:
            self._open_call("")
        else:
            self._state = self._content
        return True

    def _content(self) -> bool:
        if not self._buffer:
            return False
        place, mark = self._format.marks.find(self._buffer, is_end=self._is_end)
        self._add_content(self._buffer[:place])
        self._buffer = self._buffer[place:]
        if mark is None:
            return False
        self._buffer = self._buffer[len(mark) :]
        reasoning = self._format.reasoning
        if reasoning is not None and mark == reasoning.begin:
            self._has_reasoned = False
            self._state = self._reasoning
        elif mark in self._format.dropped:
            self._trims = True
        elif self._may_call:
            self._open_call(mark)
        else:
            self._add_content(mark)
        return True

    def _reasoning(self) -> bool:
        reasoning = self._format.reasoning
        assert reasoning is not None
        if not self._buffer:
            return False
        place, mark = self._format.reasoning_marks.find(self._buffer, is_end=self._is_end)
        self._add_reasoning(self._buffer[:place])
        self._buffer = self._buffer[place:]
        if mark is None:
            return False
        self._buffer = self._buffer[len(mark) :]
        if mark == reasoning.end:
            self._space, self._trims = "", True
            self._state = self._answer()
        elif self._has_reasoned:  # a begin mark before any reasoning repeats that of the prompt
            self._add_reasoning(mark)
        return True

    def _call(self) -> bool:
        """Read a call up to its arguments, or to its end where it is read as a whole."""
        header, tools, text = self._format.header, self._tools, self._buffer
        start = text.lstrip()
        if not start:
            return self._give_up(len(text)) if self._is_end else False
        if header is not None:
            before = self._mark if tools.syntax else ""
            may_match = self._num_read < _MAX_HEADER
            if may_match and (found := header.match(before + text[:_MAX_HEADER])) is not None:
                return self._open_arguments(found, found.end() - len(before))
            if start[0] in "{[" and (tools.is_json or tools.may_be_json):
                return self._whole_object(len(text) - len(start))
            if tools.is_json:
                return self._give_up(0)
        end = tools.begins.get(self._mark, "")
        place = -1
        if end:
            place = text.find(end, self._num_read)
        elif tools.syntax == "python":
            place = self._python.find(text)
        if place < 0 and self._is_end:
            place = len(text)
            if end:
                return self._give_up(place)
        if place < 0:
            self._num_read = max(0, len(text) - len(end) + 1)
            return False
        return self._whole_call(place + len(end), end)

    def _whole_call(self, length: int, end: str) -> bool:
        """Read a call in its syntax, from its mark to its end."""
        text = self._buffer[:length].removesuffix(end)
        calls = read_calls(self._tools.syntax, text)
        if not calls or not self._may_make(calls):
            return self._give_up(length)
        self._buffer = self._buffer[length:]
        self._add_calls(calls)
        self._trims = True
        self._state = self._content
        return True

    def _whole_object(self, begin: int) -> bool:
        """Read a call whose arguments cannot be passed on as they grow."""
        place = max(begin, self._num_read)
        length = self._json.feed(self._buffer[place:])
        if length < 0:
            self._num_read = len(self._buffer)
            return self._give_up(self._num_read) if self._is_end else False
        end = place + length
        calls = object_calls(self._buffer[begin:end], is_bare=not self._mark)
        if not self._json.is_whole or not calls or not self._may_make(calls):
            return self._give_up(end)
        self._buffer = self._buffer[end:]
        self._add_calls(calls)
        self._literal = 0
        self._state = self._after
        return True

    def _arguments(self) -> bool:
        text = self._buffer if self._has_arguments else self._buffer.lstrip()
        length = self._json.feed(text)
        part = text if length < 0 else text[:length]
        if part:
            self._has_arguments = True
            self._pieces.append(ToolCallDelta(self._num_calls - 1, part))
        self._buffer = text[len(part) :]
        if length < 0 and not (self._is_end and not self._has_arguments):
            return False
        if not self._has_arguments:
            self._pieces.append(ToolCallDelta(self._num_calls - 1, "{}"))
        self._literal = 0
        self._state = self._after
        return True

    def _xml_arguments(self) -> bool:
        part = self._xml.push(self._buffer)
        if self._is_end and not self._xml.is_whole:
            part += self._xml.finish()
        if part:
            self._pieces.append(ToolCallDelta(self._num_calls - 1, part))
        self._buffer = self._xml.rest if self._xml.is_whole else ""
        if not self._xml.is_whole:
            return False
        self._literal = 0
        self._state = self._after
        return True

    def _after(self) -> bool:
        """Drop the text that follows arguments, up to the next call."""
        if not self._skip(self._tools.after):
            return False
        text = self._buffer.lstrip()
        for literal in self._tools.between if self._may_call else ():
            if text.startswith(literal):
                self._buffer = text[len(literal) :]
                self._open_call(literal)
                return True
            if literal.startswith(text) and not self._is_end:
                return False
        self._literal = 0
        self._state = self._last
        return True

    def _last(self) -> bool:
        """Drop the text that follows the last call."""
        if not self._skip(self._tools.final):
            return False
        self._trims = True
        self._state = self._content
        return True

    # ---- parts of the states -------------------------------------------------------------------

    @property
    def _may_call(self) -> bool:
        return self._max_calls is None or self._num_calls < self._max_calls

    def _may_make(self, calls: list[ReadCall]) -> bool:
        return self._max_calls is None or self._num_calls + len(calls) <= self._max_calls

    def _skip(self, literals: tuple[str, ...]) -> bool:
        """Drop the literals that are there. Returns False when more text decides on one."""
        while self._literal < len(literals):
            text, literal = self._buffer.lstrip(), literals[self._literal]
            if text.startswith(literal):
                self._buffer = text[len(literal) :]
            elif literal.startswith(text) and not self._is_end:
                return False
            self._literal += 1
        return True

    def _open_call(self, mark: str) -> None:
        self._mark = mark
        self._json = JsonEnd()
        self._python = PythonEnd()
        self._num_read = 0
        self._state = self._call

    def _open_arguments(self, header: re.Match[str], length: int) -> bool:
        groups = header.groupdict()
        quoted = groups.get("json_name")
        name = unquoted(quoted) if quoted else groups["name"]
        self._add_call(name, "", groups.get("id") or "")
        self._buffer = self._buffer[length:]
        if self._tools.syntax is not None:
            tags = xml_tags(self._tools.syntax, self._mark)
            self._xml = XmlArguments(tags, self._schemas.get(name, {}))
            self._state = self._xml_arguments
            return True
        self._json = JsonEnd()
        self._has_arguments = False
        self._state = self._arguments
        return True

    def _give_up(self, length: int) -> bool:
        """Return a part of the buffer, which began like a call, as content."""
        self._add_content(self._mark + self._buffer[:length])
        self._buffer = self._buffer[length:]
        self._state = self._content
        return True

    def _add_calls(self, calls: list[ReadCall]) -> None:
        for name, arguments in calls:
            self._add_call(name, arguments)

    def _add_call(self, name: str, arguments: str, call_id: str = "") -> None:
        length = self._tools.id_length
        call_id = call_id or (new_id()[:length] if length else f"call_{new_id()}")
        self._pieces.append(ToolCallDelta(self._num_calls, arguments, call_id, name))
        self._num_calls += 1

    def _add_content(self, text: str) -> None:
        if self._trims:
            text = text.lstrip()
        if text:
            self._trims = False
            self._pieces.append(Content(text))

    def _add_reasoning(self, text: str) -> None:
        text = self._space + text
        if not self._has_reasoned:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._has_reasoned = True
            self._pieces.append(Reasoning(shown))
