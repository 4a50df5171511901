"""The values that an agent takes and returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tandem.runtime.errors import TransferError
from tandem.transfer.transport import Memory

State: TypeAlias = Literal["PROC", "DONE"]


@dataclass(frozen=True, slots=True)
class nixl_agent_config:
    """The options of an agent. Its progress thread polls twice a millisecond.

    The library's own thread would take a whole core. Without a thread, transfers progress only
    while both agents are called: both ends must call get_new_notifs() repeatedly.
    """

    enable_prog_thread: bool = True
    backends: Sequence[str] = ("UCX",)


@dataclass(frozen=True, slots=True, eq=False)
class RegisteredMemory:
    """The regions that get_reg_descs() returns and register_memory() takes."""

    memory: Memory
    regions: list[tuple[int, int, int, str]]  # (address, bytes, device id, "")


@dataclass(frozen=True, slots=True, eq=False)
class PreparedList:
    """One side of transfers; pieces are picked by index."""

    side: str  # "" is this one, else the agent's name
    lengths: NDArray[np.uint64]  # [num_pieces], bytes
    handle: Any


@dataclass(slots=True, eq=False)
class TransferHandle:
    """One transfer; `error` is set once it has failed."""

    doing: str
    peer: str
    handle: Any
    state: Literal["NEW", "PROC", "DONE"] = "NEW"
    error: TransferError | None = None
