"""A role of a worker."""

import contextlib
from typing import Protocol

from tandem.engine.schedule.outputs import LoadStats, SequenceOutput
from tandem.runtime.address import EndpointAddress
from tandem.runtime.wire.cluster_messages import RoleName
from tandem.runtime.wire.handoff_messages import PrefillJob

Details = dict[str, str | int | float | bool]


class TicketOwner(Protocol):
    """The owner of the tickets that this worker publishes, and of the blocks that they fill."""

    def on_notification(self, rank: int, data: bytes) -> None:
        """Handle a message of the transfer plane to one of the own ranks."""

    def leaves_tickets(self, load: LoadStats) -> bool:
        """Return True if another worker should take the tickets, with this load here."""

    def take_back(self, job: PrefillJob) -> bool:
        """Compute the prompt of an own ticket here; False where another worker was asked for."""


class Role(Protocol):
    """A role of a worker; its methods are called on the event loop."""

    name: RoleName
    endpoint: EndpointAddress

    @property
    def tickets(self) -> TicketOwner | None:
        """The owner of the tickets of a role that publishes some, once it has started."""

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

    def loaded(self, load: LoadStats) -> None:
        """Record the engine's load, which was measured just now."""
        ...

    def details(self, load: LoadStats) -> Details:
        """Return lines of `tandem status`."""
        ...
