"""The learned time that a remote prefill adds to computing: messages, transfer, verification."""

from tandem.engine.schedule.step_cost import LinearCost

FIXED_S = 0.005  # before anything was measured
BYTES_PER_S = 2e9
TOKENS = 512  # tokens are counted in these, so that both features are of the same magnitude
SLACK_S = 0.05
MAX_CLAIM_S = 0.02  # a longer wait for a claim is a wait for a busy worker


class TransferCost:
    """Seconds by tokens of a prompt: linear, learned from handoffs.

    It begins with a cautious guess, and then with the rate of a link once one is measured.
    """

    def __init__(self, bytes_per_token: float) -> None:
        self.has_learned = False  # from a handoff
        self.begin_with(bytes_per_token / BYTES_PER_S)

    def begin_with(self, s_per_token: float) -> None:
        """Begin with the rate of a link; no effect once a handoff has taught more."""
        if self.has_learned:
            return
        self._cost = LinearCost(2, SLACK_S)
        self._cost.begin_with([FIXED_S, TOKENS * s_per_token])

    def observe(self, num_tokens: int, stages_ms: dict[str, float]) -> None:
        """Learn from the timeline of a handoff that was admitted."""
        if not {"queued", "claimed", "computed", "verified"} <= stages_ms.keys():
            return
        self.has_learned = True
        claim_s = max(0.0, stages_ms["claimed"] - stages_ms["queued"]) / 1e3
        rest_s = max(0.0, stages_ms["verified"] - stages_ms["computed"]) / 1e3
        self._cost.observe(_features(num_tokens), min(claim_s, MAX_CLAIM_S) + rest_s)

    def seconds(self, num_tokens: int) -> float:
        """Return the expected seconds for a prompt of `num_tokens` uncached tokens."""
        return self._cost.predict(_features(num_tokens))


def _features(num_tokens: int) -> list[float]:
    return [1.0, num_tokens / TOKENS]
