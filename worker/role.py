"""A role of a worker, and the prompts of a worker for which those of others wait."""

import asyncio
import contextlib
from typing import Protocol

from tandem.engine.outputs import LoadStats, SequenceOutput
from tandem.runtime.address import EndpointAddress
from tandem.runtime.messages import RoleName

Details = dict[str, str | int | float | bool]


class Role(Protocol):
    """A role of a worker; its methods are called on the event loop."""

    name: RoleName
    endpoint: EndpointAddress

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Prepare to work; the worker's parts are up. `stack` is closed before they are.

        A start that failed or was cancelled can be tried again after `stack` was closed.
        """
        ...

    async def take_up(self) -> None:
        """Take work, as far as its registration in discovery does not bring it."""
        ...

    async def drain(self, patience_s: float | None = None) -> None:
        """Take no new work, and wait for the work in hand.

        After `patience_s` the work in hand is handed over to other workers.
        """
        ...

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        """Take the outputs of one step; those of unknown requests are not this role's."""
        ...

    def details(self, load: LoadStats) -> Details:
        """Return lines of `tandem status`."""
        ...


class OwnPrompts:
    """Prompts that wait or are computed here for answers of this worker.

    While there is one, the prefill role of the same worker takes no prompt of another worker.
    """

    def __init__(self) -> None:
        self._request_ids: set[str] = set()
        self.none = asyncio.Event()
        self.none.set()
        self.changed = asyncio.Event()  # the first came, or the last is gone

    def add(self, request_id: str) -> None:
        if not self._request_ids:
            self.none.clear()
            self.changed.set()
        self._request_ids.add(request_id)

    def discard(self, request_id: str) -> None:
        self._request_ids.discard(request_id)
        if not self._request_ids and not self.none.is_set():
            self.none.set()
            self.changed.set()
