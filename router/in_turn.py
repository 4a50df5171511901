"""The policy `round_robin`: the instances in turn, whatever they hold or do. Pure."""

from tandem.router.decision import Known, RoutingDecision


class InTurn:
    """Chooses in the order of the IDs; nothing is predicted."""

    def __init__(self, known: Known) -> None:
        self._last = ""  # the instance of the last choice

    def heeds_prefix(self, candidates: list[str]) -> bool:
        return False

    def choose(
        self,
        candidates: list[str],
        hashes: list[bytes],
        num_blocks: int,
        ttft_target_s: float | None,
        named: str,
    ) -> RoutingDecision:
        if named:
            candidates = [named]
        following = (each for each in candidates if each > self._last)
        self._last = min(following, default=min(candidates))
        return RoutingDecision(self._last, 0, f"in turn; 1 of {len(candidates)}")
