"""Settings of the prefill queue."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class QueueConfig(BaseModel):
    """Limits of the prefill queue: how long a job may wait, and how often it is delivered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    storage: Literal["memory", "file"] = Field("memory", description="where the broker keeps jobs")
    ack_wait_s: float = Field(
        5.0,
        gt=0,
        description="a job whose worker sends no sign of life for this long is delivered again (s)",
    )
    max_deliver: int = Field(
        3, ge=1, description="deliveries after which a job becomes a dead letter"
    )
    max_age_s: float = Field(
        120.0, gt=0, description="age at which a job is removed; deadlines are far shorter (s)"
    )
    max_dead: int = Field(1000, ge=1, description="dead letters that are kept for inspection")
    request_timeout_s: float = Field(0.5, gt=0, lt=1, description="longest call to the broker (s)")
