"""The router's config: how it chooses, the weight of prefix overlap, and the index's size."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class RouterConfig(BaseModel):
    """How a worker is chosen, the weight of a cached prefix, and the size of the KV index."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal["cost", "round_robin"] = Field(
        "cost",
        description="cost: the worker where a prompt is predicted to delay all answers least; "
        "round_robin: the workers in turn, whatever they hold or do",
    )
    overlap_weight: float = Field(
        1.0,
        ge=0,
        description="weight of a block that a prefix cache saves, and where no costs of steps are "
        "known, of a block to prefill against one being decoded; 0 routes by load alone",
    )
    max_index_entries: int = Field(
        4_000_000,
        ge=1,
        description="most (block, instance) pairs the KV index remembers; the oldest that "
        "were not looked up lately go first",
    )
