"""Parts of a conversation that a model cannot take."""

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.invalid import invalid_field
from tandem.runtime.printable import short

_NAMES = (("image", "image"), ("screenshot", "image"), ("audio", "audio"), ("video", "video"))


class Unseen:
    """Text in the place of images and files, for one request.

    They are refused in a new message of the user, whose question may be about them, and everywhere
    unless `as_text`. A model that `sees` gets images of the user, but none of anyone else.
    """

    def __init__(self, ignored: Ignored, *, as_text: bool, sees: bool) -> None:
        self._ignored = ignored
        self._as_text = as_text
        self._supported = "text and images of the user are" if sees else "text is"
        self._reason = "not shown" if sees else "not shown, this model reads text only"

    def text(self, kind: str, field: str, *, is_new: bool) -> str:
        """Return the text for a part of the type `kind`. Raises InvalidRequestError naming it."""
        if is_new or not self._as_text:
            raise invalid_field(
                f"{field}.type", f"is {short(kind)!r}; only {self._supported} supported"
            )
        self._ignored.note(field)
        name = next((name for word, name in _NAMES if word in kind), "file")
        return f"[{name}: {self._reason}]"
