"""The formats of one model, ready for its parsers: the marks that its text may have."""

import re
from functools import cache

from tandem.frontend.parsers.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
)
from tandem.frontend.parsers.marks import Marks

_NO_TOOLS = ToolFormat({})


class OutputFormat:
    """The formats of reasoning and of calls, and the marks of both."""

    def __init__(self, reasoning: ReasoningFormat | None, tools: ToolFormat | None) -> None:
        self.reasoning = reasoning
        self.tools = tools = tools or _NO_TOOLS
        self.dropped = (reasoning.dropped if reasoning else ()) + tools.dropped
        ends = [reasoning.begin, reasoning.end] if reasoning else []
        self.marks = Marks([*self.dropped, *ends[:1], *tools.begins])
        self.reasoning_marks = Marks(ends)
        self.header = re.compile(tools.header, re.DOTALL) if tools.header else None
        calls = {*tools.begins, *tools.begins.values(), *tools.after, *tools.final, *tools.inner}
        self.all_marks = frozenset({*self.dropped, *ends, *calls} - {""})


@cache
def output_format(reasoning: str, tools: str) -> OutputFormat:
    """Return the formats of these names, ready for their parsers."""
    return OutputFormat(REASONING_FORMATS.get(reasoning), TOOL_FORMATS.get(tools))
