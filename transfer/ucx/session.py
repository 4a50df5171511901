"""Sessions of the UCX transport, and their transfers."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tandem.runtime.errors import TransferError
from tandem.transfer.transport import BlockGrid
from tandem.transfer.ucx.pieces import Span
from tandem.transfer.ucx.port import finished
from tandem.transfer.ucx.wire import Kind


@dataclass(slots=True, eq=False)
class UcxTransfer:
    """One WRITE or READ, at either end."""

    session: "UcxSession"
    transfer_id: int
    kind: Kind
    spans: list[Span]
    notice: bytes = b""
    requests: deque[Any] = field(default_factory=deque)  # payload under way, in order
    has_go: bool = False
    answered: bool = False
    error: str = ""

    def settle(self) -> bool:
        """Return True once no payload is under way any more; the first failure ends all."""
        try:
            while self.requests and finished(self.requests[0]):
                self.requests.popleft()
        except TransferError as exc:
            self.fail(exc.message)
        return not self.requests

    def fail(self, error: str) -> None:
        """End the transfer with its first error."""
        self.error = self.error or error
        self.requests.clear()  # which cancels receives that nothing has matched


@dataclass(slots=True, eq=False)
class UcxSession:
    """A session with a peer, opened by this process (`is_own`) or by the peer."""

    name: str
    session_id: int
    key: bytes  # the peer's
    endpoint: Any
    grid: BlockGrid | None  # the peer's pool; None if the peer opened the session
    transfers: dict[int, UcxTransfer] = field(default_factory=dict)
    broken: str = ""  # the reason why it can't be used any more

    @property
    def is_own(self) -> bool:
        """This process opened the session."""
        return self.grid is not None

    def sever(self, reason: str) -> None:
        """Fail all transfers of the session, which can't be used any more."""
        self.broken = self.broken or reason
        for transfer in self.transfers.values():
            transfer.fail(reason)
        self.transfers.clear()
