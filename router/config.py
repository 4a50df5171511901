"""The router's config: the weights of prefix overlap and load."""

from pydantic import BaseModel, ConfigDict, Field


class RouterConfig(BaseModel):
    """Weights of the cost function, and the size of the KV index."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
