"""The data-parallel rank of a request."""

import logging

from tandem.sdk.engine.types import GenerateRequest

logger = logging.getLogger(__name__)


def forced_dp_rank(request: GenerateRequest) -> int | None:
    """Return the rank that the router chose, counted over the cluster; None without a choice."""
    rank = (request.get("routing") or {}).get("dp_rank")
    return None if rank is None else int(rank)


def validate_global_dp_rank(
    dp_rank: int | None, dp_start: int, dp_size: int, backend_label: str
) -> int | None:
    """Return the rank if it is in `dp_start .. dp_start + dp_size - 1`, else None.

    None also for a worker of one rank. Log a warning for another worker's rank.
    """
    if dp_rank is None or dp_size <= 1:
        return None
    if dp_start <= dp_rank < dp_start + dp_size:
        return dp_rank
    logger.warning(
        "data-parallel rank %d is outside [%d, %d): %s chooses the rank",
        dp_rank,
        dp_start,
        dp_start + dp_size,
        backend_label,
    )
    return None
