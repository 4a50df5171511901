"""Which data-parallel rank of a worker a request belongs to."""

import logging

from tandem.sdk.engine.types import GenerateRequest

logger = logging.getLogger(__name__)


def forced_dp_rank(request: GenerateRequest) -> int | None:
    """The rank that the router chose, counted over the whole cluster; None where it did not."""
    rank = (request.get("routing") or {}).get("dp_rank")
    return None if rank is None else int(rank)


def validate_global_dp_rank(
    dp_rank: int | None, dp_start: int, dp_size: int, backend_label: str
) -> int | None:
    """The rank if this worker hosts it, in `dp_start .. dp_start + dp_size - 1`; else None.

    A worker of one rank has nothing to choose. A rank of another worker is logged.
    """
    if dp_rank is None or dp_size <= 1:
        return None
    if dp_start <= dp_rank < dp_start + dp_size:
        return dp_rank
    logger.warning(
        "data-parallel rank %d is outside [%d, %d): %s chooses a rank itself",
        dp_rank,
        dp_start,
        dp_start + dp_size,
        backend_label,
    )
    return None
