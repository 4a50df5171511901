"""The data-parallel rank of each request of an engine that has several."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.sdk.engine.types import GenerateRequest

_HEAD_TOKENS = 64  # equal ones go to one rank, whose prefix cache may hold them


class Ranks:
    """Ranks `start` .. `start + size - 1`, counted over the cluster, and their open requests."""

    def __init__(self, start: int, size: int) -> None:
        self._ranks = range(start, start + size)
        self._num_open: Counter[int] = Counter()

    @contextmanager
    def routed(self, request: GenerateRequest) -> Iterator[GenerateRequest]:
        """Open a request: with its caller's rank, else with one of the least open requests.

        Among several of these the head of the prompt decides.
        """
        routing = request.get("routing") or {}
        rank = routing.get("dp_rank")
        if rank is None:
            rank = self._least_busy(request["token_ids"])
        self._num_open[rank] += 1
        try:
            yield {**request, "routing": {**routing, "dp_rank": rank}}
        finally:
            self._num_open[rank] -= 1

    def _least_busy(self, token_ids: list[int]) -> int:
        least = min(self._num_open[rank] for rank in self._ranks)
        idle = [rank for rank in self._ranks if self._num_open[rank] == least]
        return idle[hash(tuple(token_ids[:_HEAD_TOKENS])) % len(idle)]
