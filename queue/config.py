"""Settings of the prefill queue."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class QueueConfig(BaseModel):
    """How long a job may wait, and how often it is tried."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    storage: Literal["memory", "file"] = "memory"  # where the broker keeps jobs
    ack_wait_s: float = Field(5.0, gt=0)  # without a sign of life for so long: delivered again
    max_deliver: int = Field(3, ge=1)  # then the job is a dead letter
    max_age_s: float = Field(120.0, gt=0)  # older jobs vanish; deadlines are far shorter
    max_dead: int = Field(1000, ge=1)  # dead letters that are kept to be looked at
    request_timeout_s: float = Field(0.5, gt=0, lt=1)  # of a call to the broker
