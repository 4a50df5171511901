"""Settings of the prefill queue."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class QueueConfig(BaseModel):
    """Limits of the prefill queue: number, size and age of jobs, and how often one is delivered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    storage: Literal["memory", "file"] = Field("memory", description="where the broker keeps jobs")
    replicas: int | None = Field(
        None,
        ge=1,
        le=5,
        description="servers of a NATS cluster that have each job; by default 3 where "
        "`runtime.nats_url` has three addresses or more, and else 1",
    )
    ack_wait_s: float = Field(
        5.0,
        gt=0,
        description="a job whose worker sends no sign of life for this long is delivered again (s)",
    )
    max_deliver: int = Field(
        16,
        ge=1,
        description="deliveries without an answer after which a job becomes a dead letter",
    )
    max_age_s: float = Field(120.0, gt=0, description="age at which a job is removed (s)")
    max_jobs: int = Field(
        4096, ge=1, description="jobs on the queue beyond which prompts are prefilled locally"
    )
    max_queue_bytes: int = Field(
        16 * 1024 * 1024, ge=65536, description="size of all jobs, and of all dead letters (bytes)"
    )
    max_job_bytes: int = Field(8192, ge=1024, description="size of one job (bytes)")
    max_job_tokens: int = Field(
        4_194_304, ge=1, description="a job of a longer prompt is a dead letter (tokens)"
    )
    request_timeout_s: float = Field(0.5, gt=0, lt=1, description="longest call to the broker (s)")
