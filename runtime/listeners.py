"""Callbacks that are called on each change, and can be removed again."""

import logging
from collections.abc import Callable
from typing import Generic, ParamSpec

logger = logging.getLogger(__name__)

P = ParamSpec("P")


class Listeners(Generic[P]):
    """Callbacks in the order in which they were added."""

    __slots__ = ("_callbacks",)

    def __init__(self) -> None:
        self._callbacks: dict[object, Callable[P, object]] = {}

    def add(self, callback: Callable[P, object]) -> Callable[[], None]:
        """Add a callback; return the function that removes it."""
        token = object()
        self._callbacks[token] = callback

        def remove() -> None:
            self._callbacks.pop(token, None)

        return remove

    def tell(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call each; the error of one is logged and does not reach the others."""
        for callback in list(self._callbacks.values()):
            try:
                callback(*args, **kwargs)
            except Exception:
                logger.exception("a listener failed on %s", args)

    def clear(self) -> None:
        """Remove all."""
        self._callbacks.clear()
