"""Plain text, all of it content."""

from tandem.frontend.parsers.pieces import Content, OutputParser, Piece, Reasoning


class PlainParser:
    """Parser of models without a format for reasoning or tool calls."""

    __slots__ = ()
    is_in_call = False

    def push(self, text: str) -> list[Piece]:
        return [Content(text)]

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        return []


class WithoutReasoning:
    """A parser whose pieces of reasoning are left out."""

    __slots__ = ("_parser",)

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[Piece]:
        return _without_reasoning(self._parser.push(text))

    @property
    def is_in_call(self) -> bool:
        return self._parser.is_in_call

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        return _without_reasoning(self._parser.finish(is_cut=is_cut))


def _without_reasoning(pieces: list[Piece]) -> list[Piece]:
    return [piece for piece in pieces if not isinstance(piece, Reasoning)]
