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


class OutputFormat:
    """The formats of reasoning and of calls, and the marks of both."""

    def __init__(self, reasoning: ReasoningFormat | None, tools: ToolFormat | None) -> None:
        self.reasoning = reasoning
        self.tools = tools
        self.dropped = (reasoning.dropped if reasoning else ()) + (tools.dropped if tools else ())
        begins = [reasoning.begin] if reasoning else []
        calls = list(tools.begins) if tools else []
        self.marks = Marks([*self.dropped, *begins, *calls])
        self.reasoning_marks = Marks([reasoning.begin, reasoning.end] if reasoning else [])
        self.header = re.compile(tools.header, re.DOTALL) if tools and tools.header else None

        self.all_marks = self._all_marks()

    def _all_marks(self) -> frozenset[str]:
        """Return all marks that the text of an answer may have."""
        tools, reasoning = self.tools, self.reasoning
        marks = set(self.dropped)
        marks |= {reasoning.begin, reasoning.end} if reasoning else set()
        if tools is not None:
            marks |= {
                *tools.begins,
                *tools.begins.values(),
                *tools.after,
                *tools.final,
                *tools.inner,
            }
        return frozenset(marks - {""})


@cache
def output_format(reasoning: str, tools: str) -> OutputFormat:
    """Return the formats of these names, ready for their parsers."""
    return OutputFormat(REASONING_FORMATS.get(reasoning), TOOL_FORMATS.get(tools))
