"""The roles that the keys of `tandem top` give to workers, one at a time and with undo."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from tandem.runtime.wire.cluster_messages import WorkerRole

ROLE_KEYS: Mapping[str, WorkerRole] = {"d": "decode", "p": "prefill", "b": "both"}
_CHOICE = ", ".join(f"{key} {role}" for key, role in ROLE_KEYS.items())


class Worker(NamedTuple):
    """The selected worker, as it was when a key was pressed."""

    instance_id: str
    role: WorkerRole

    @property
    def name(self) -> str:
        """The name on the screen."""
        return f"worker {self.instance_id[:8]}"


class RoleChanges:
    """The changes of one session. `change` gives the worker of an id a role, or raises."""

    def __init__(
        self,
        change: Callable[[str, WorkerRole], Awaitable[object]],
        on_change: Callable[[], object],
    ) -> None:
        self._change, self._on_change = change, on_change
        self._chosen: Worker | None = None  # it gets the role of the next key
        self._before: Worker | None = None  # for undo
        self._task: asyncio.Task[None] | None = None
        self._note = ""
        self._begun_s = 0.0

    def press(self, key: str, selected: Worker | None) -> bool:
        """Take a key; return False for a key that has another meaning."""
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            self._note = ""
            if key in ROLE_KEYS:
                self._begin(chosen, ROLE_KEYS[key])
            return key != "q"
        if key not in ("r", "u"):
            return False
        if self._task is not None:
            return True
        if key == "u" and self._before is not None:
            undone, self._before = self._before, None
            self._begin(undone, undone.role, is_undo=True)
        elif key == "r" and selected is not None:
            self._chosen = selected
            self._note = f"role of {selected.name}, {selected.role} now: {_CHOICE}; else it stays"
        else:
            self._note = "no role was changed here" if key == "u" else "select a worker: up, down"
        return True

    def note(self, now_s: float) -> str:
        """Return the line for the screen; empty without one."""
        if self._task is None:
            return self._note
        return f"{self._note}, for {now_s - self._begun_s:.0f} s"

    def close(self) -> None:
        """Wait for no answer any more."""
        if self._task is not None:
            self._task.cancel()

    def _begin(self, worker: Worker, role: WorkerRole, *, is_undo: bool = False) -> None:
        self._note, self._begun_s = f"{worker.name} gets the role {role}", time.perf_counter()
        self._task = asyncio.create_task(self._run(worker, role, is_undo))

    async def _run(self, worker: Worker, role: WorkerRole, is_undo: bool) -> None:
        try:
            await self._change(worker.instance_id, role)
            self._note = f"{worker.name} has the role {role}"
            if not is_undo:
                self._before = worker
                self._note += f"; u gives back {worker.role}"
        except Exception as error:  # an answer that is none, too: the screen stays
            self._note = f"{worker.name} does not get the role {role}: {error}"
        finally:
            self._task = None
            self._on_change()
