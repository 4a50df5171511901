"""Files that are read again when they change."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.runtime.errors import TandemError
from tandem.runtime.tasks import cancel

logger = logging.getLogger(__name__)

_POLL_S = 2.0


class WatchedFiles:
    """Calls `reload` after a change of any of `paths`, between `start` and `close`.

    A change is one of inode, size or time since the construction. After a `reload` that raises
    TandemError what was read before stays in force.
    """

    def __init__(self, paths: Sequence[str], reload: Callable[[], None]) -> None:
        self._paths = list(map(Path, paths))
        self._reload = reload
        self._seen = self._state()
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Watch from now on."""
        if self._paths:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        """Stop watching. Idempotent."""
        await cancel(self._watching)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            state = self._state()
            if state == self._seen:
                continue
            self._seen = state
            names = ", ".join(map(str, self._paths))
            try:
                self._reload()
            except TandemError as error:
                logger.warning("the change of %s is not in force: %s", names, error)
            else:
                logger.info("read %s again", names)

    def _state(self) -> list[tuple[int, int, int] | None]:
        return [_state_of(path) for path in self._paths]


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
