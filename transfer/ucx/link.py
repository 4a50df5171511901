"""Sessions of the UCX transport and the transfers in them."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tandem.runtime.errors import TransferError
from tandem.transfer.transport import BlockGrid
from tandem.transfer.ucx.pieces import Span
from tandem.transfer.ucx.port import finished
from tandem.transfer.ucx.wire import Kind


@dataclass(slots=True, eq=False)
class Transfer:
    """One WRITE or READ, at either end."""

    link: "Link"
    transfer_id: int
    kind: Kind
    spans: list[Span]
    notice: bytes = b""
    requests: deque[Any] = field(default_factory=deque)  # payload under way, in order
    told_go: bool = False
    answered: bool = False
    error: str = ""

    def settle(self) -> bool:
        """Whether no payload is under way any more; the first failure ends all of it."""
        try:
            while self.requests and finished(self.requests[0]):
                self.requests.popleft()
        except TransferError as exc:
            self.fail(exc.message)
        return not self.requests

    def fail(self, error: str) -> None:
        self.error = self.error or error
        self.requests.clear()  # which cancels receives that nothing has matched


@dataclass(slots=True, eq=False)
class Link:
    """A session with a peer: one that we opened (`ours`), or one that it opened."""

    name: str
    session: int
    key: bytes  # the peer's
    endpoint: Any
    grid: BlockGrid | None  # the peer's pool; None if the peer opened the session
    transfers: dict[int, Transfer] = field(default_factory=dict)
    broken: str = ""  # why it is of no use any more

    @property
    def ours(self) -> bool:
        """Whether we opened the session."""
        return self.grid is not None

    def sever(self, reason: str) -> None:
        self.broken = self.broken or reason
        for transfer in self.transfers.values():
            transfer.fail(reason)
        self.transfers.clear()
