"""Settings of the transfer room."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tandem.runtime.port_range import checked_range

Backend = Literal["nixl", "ucx", "loopback"]

# The work of a GPU that ends before a broken write is known to be over: a prefill step, at most.
SETTLING_MS = 500


class TransferConfig(BaseModel):
    """The transport that moves KV between workers, and the time limits of a write."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Backend = Field("nixl", description="ucx: through ucxx; loopback: for tests")
    port_range: str | None = Field(
        None,
        description="TCP ports on which UCX listens, as in 31100-31199: several for each worker of "
        "a host; null: any free ones, or those of UCX_TCP_PORT_RANGE",
    )
    verify: bool = Field(
        True,
        description="check the checksum of every landed block before it is read; must be equal on "
        "all workers",
    )
    write_timeout_s: float = Field(
        2.0,
        gt=0,
        description=f"longest write; with {SETTLING_MS} ms in which a GPU settles at most "
        "lease_margin_ms + grace_ms (s)",
    )
    lease_margin_ms: int = Field(
        50, ge=0, description="no write is posted this close to the end of its lease (ms)"
    )
    grace_ms: int = Field(
        2_500, ge=0, description="blocks stay in quarantine this long after their lease (ms)"
    )
    stream_layers: bool = Field(
        True,
        description="deliver the end of a prompt by groups of layers where that is faster",
    )
    pull_prefixes: bool = Field(
        True,
        description="READ the prefix that the decode worker has cached where that is faster",
    )
    exclude_after: int = Field(
        3, ge=1, description="checksum mismatches within a minute that exclude a prefill worker"
    )
    exclude_for_s: float = Field(
        60.0,
        ge=0,
        description="time an excluded prefill worker gets no work from this decode worker (s)",
    )

    _is_a_range = field_validator("port_range")(checked_range)

    @model_validator(mode="after")
    def _check_quarantine(self) -> Self:
        longest_ms = self.write_timeout_s * 1e3 + SETTLING_MS
        if longest_ms > self.lease_margin_ms + self.grace_ms:
            raise ValueError(
                f"a write may take write_timeout_s {self.write_timeout_s:g} and {SETTLING_MS} ms, "
                f"which is longer than blocks wait for it: raise lease_margin_ms "
                f"({self.lease_margin_ms}) or grace_ms ({self.grace_ms})"
            )
        return self
