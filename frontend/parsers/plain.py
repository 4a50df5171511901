"""Plain text, all of it content."""

from tandem.frontend.generation.pieces import Content, Piece


class PlainParser:
    """Parser of models without a format for reasoning or tool calls."""

    __slots__ = ()
    is_in_call = False

    def push(self, text: str) -> list[Piece]:
        return [Content(text)]

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        return []
