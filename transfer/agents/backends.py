"""The transports by their names in the config."""

from typing import TYPE_CHECKING

from tandem.transfer.config import Backend

if TYPE_CHECKING:
    from tandem.transfer.transport import Transport


def open_transport(backend: Backend, name: str) -> "Transport":
    """Return a new transport; TransferError where its library is missing.

    `name` must be unique among all transports that may ever meet.
    """
    # Each is imported where it is chosen: a process loads no library that it doesn't use.
    match backend:
        case "nixl":
            from tandem.transfer.nixl import NixlTransport

            return NixlTransport(name)
        case "ucx":
            from tandem.transfer.ucx.transport import UcxTransport

            return UcxTransport(name)
        case "loopback":
            from tandem.transfer.loopback import PROCESS_FABRIC, LoopbackTransport

            return LoopbackTransport(name, PROCESS_FABRIC)
