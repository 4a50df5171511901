"""The settings of the planner."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Mode = Literal["advise", "act"]


class PlannerConfig(BaseModel):
    """The planner of roles and numbers of workers: its mode, its pace and its bounds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode = Field("advise", description="`advise`: say what should change; `act`: change it")
    interval_s: float = Field(3.0, ge=0.5, le=3600, description="seconds between two decisions")
    min_prefill: int = Field(
        1, ge=1, le=4096, description="fewest prefill workers of a model, once it has one"
    )
    min_decode: int = Field(
        1, ge=1, le=4096, description="fewest workers of a model that generate tokens"
    )
    min_workers: int = Field(1, ge=1, le=4096, description="fewest workers of a model")
    max_workers: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="most workers of a model; null: the planner starts and ends none",
    )
