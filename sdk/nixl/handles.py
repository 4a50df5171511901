"""What an agent hands out, and what it keeps until it is closed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tandem.runtime.errors import TransferError
from tandem.transfer.transport import Memory

State: TypeAlias = Literal["PROC", "DONE"]


@dataclass(frozen=True, slots=True)
class nixl_agent_config:
    """The progress thread is ours, and asks twice a millisecond; the library's takes a whole core.

    Without it things only move while the agents at both ends are called: get_new_notifs() has to
    be called again and again, by the target of transfers as well as by who began them.
    """

    enable_prog_thread: bool = True
    backends: Sequence[str] = ("UCX",)


@dataclass(frozen=True, slots=True, eq=False)
class RegisteredMemory:
    """What get_reg_descs() makes and register_memory() takes."""

    memory: Memory
    regions: list[tuple[int, int, int, str]]  # (address, bytes, device id, "")


@dataclass(frozen=True, slots=True, eq=False)
class PreparedList:
    """One side of transfers, ready to be picked from by index."""

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


@dataclass(slots=True)
class Held:
    """What goes back before the agent does."""

    memory: list[tuple[RegisteredMemory, Any]] = field(default_factory=list)
    lists: list[PreparedList] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)
    under_way: list[TransferHandle] = field(default_factory=list)
