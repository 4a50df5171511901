"""The prefill role's config."""

from pydantic import BaseModel, ConfigDict, Field


class PrefillConfig(BaseModel):
    """The budget of a prefill worker for tickets of the queue."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_batch_tokens: int = Field(
        8192,
        ge=1,
        description="uncached tokens of claimed jobs up to which more jobs are taken (tokens)",
    )
    max_batch_jobs: int = Field(16, ge=1, description="claimed jobs at one time")
