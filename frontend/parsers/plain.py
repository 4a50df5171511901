"""Plain text, all of it content."""

from tandem.frontend.generation.pieces import Content, Piece


class PlainParser:
    """Parser of models without a format for reasoning or tool calls."""

    __slots__ = ()

    def push(self, text: str) -> list[Piece]:
        return [Content(text)]

    def finish(self) -> list[Piece]:
        return []
