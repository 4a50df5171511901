"""Settings of the transfer room."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TransferConfig(BaseModel):
    """How KV moves between workers, and how long a write may take."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Literal["nixl", "ucx", "loopback"] = "nixl"  # ucx: by ucxx; loopback: for tests
    verify: bool = True  # check every landed block's checksum before it is read; alike everywhere
    poll_busy_us: float = Field(20.0, gt=0)  # between polls while something is in flight
    poll_expect_us: float = Field(600.0, gt=0)  # while a handoff is expected but all is quiet
    poll_idle_ms: float = Field(5.0, gt=0)  # between polls in quiet; 4 x before the first peer
    write_timeout_s: float = Field(2.0, gt=0)  # at most lease_margin_ms and grace_ms together
    lease_margin_ms: int = Field(50, ge=0)  # no post this close to a lease's end
    grace_ms: int = Field(2_000, ge=0)  # blocks stay in quarantine this long after a lease
    stream_layers: bool = True  # deliver a prompt's end by groups of layers where that is faster
    pull_prefixes: bool = True  # READ what the decode worker has cached where that is faster
    exclude_after: int = Field(3, ge=1)  # mismatched checksums of a prefill worker in a minute
    exclude_for_s: float = Field(60.0, ge=0)  # then it gets no work from this decode worker
