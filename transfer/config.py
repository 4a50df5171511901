"""Settings of the transfer room."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TransferConfig(BaseModel):
    """How KV moves between workers, and how long a write may take."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Literal["nixl", "loopback"] = "nixl"  # loopback: within one process, for tests
    verify: bool = True  # check every landed block's checksum before it is read
    poll_busy_us: float = Field(100.0, gt=0)  # between polls while something is in flight
    poll_expect_us: float = Field(500.0, gt=0)  # while a handoff is expected but all is quiet
    poll_idle_ms: float = Field(5.0, gt=0)  # between polls when nothing is expected
    write_timeout_s: float = Field(10.0, gt=0)  # then the connection is torn down
    lease_margin_ms: int = Field(50, ge=0)  # no post this close to a lease's end
    grace_ms: int = Field(2_000, ge=0)  # blocks stay in quarantine this long after a lease
