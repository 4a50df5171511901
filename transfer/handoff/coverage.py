"""The parts of a handoff's blocks that were announced, and those that are proven."""

from collections.abc import Sequence
from enum import Enum

from tandem.transfer.handoff.actions import Span
from tandem.transfer.layout import RankPair


class Announcement(Enum):
    NEW = "new"
    REPEATED = "repeated"
    CONFLICTING = "conflicting"  # with another checksum, or with layers announced before


class Coverage:
    """Counts layers of blocks, over every pair of ranks that blocks are written over."""

    def __init__(self, num_blocks: int, num_layers: int, rank_pairs: Sequence[RankPair]) -> None:
        self._num_layers = num_layers
        self._pairs = {(ranks.prefill_rank, ranks.decode_rank) for ranks in rank_pairs}
        self._num_units = len(rank_pairs) * num_layers * num_blocks
        self.num_unannounced = self._num_units
        self.num_unproven = self._num_units
        self._checksum_of: dict[tuple[Span, int], int] = {}  # (span, ordinal) |-> as announced
        # (prefill rank, decode rank, ordinal) |-> layers, a bit each
        self._announced: dict[tuple[int, int, int], int] = {}
        self._proven: set[tuple[Span, int]] = set()

    def includes(self, span: Span) -> bool:
        """Return True if the span exists and is to be written by its rank into that rank."""
        in_layers = 0 <= span.layers.start < span.layers.stop <= self._num_layers
        return in_layers and (span.prefill_rank, span.decode_rank) in self._pairs

    def announce(self, span: Span, ordinal: int, checksum: int) -> Announcement:
        """Record that the span of this block was written with this checksum, if that is new."""
        known = self._checksum_of.get((span, ordinal))
        if known is not None:
            return Announcement.REPEATED if known == checksum else Announcement.CONFLICTING
        key = (span.prefill_rank, span.decode_rank, ordinal)
        layers = (1 << span.layers.stop) - (1 << span.layers.start)
        before = self._announced.get(key, 0)
        if before & layers:
            return Announcement.CONFLICTING
        self._announced[key] = before | layers
        self._checksum_of[span, ordinal] = checksum
        self.num_unannounced -= len(span.layers)
        return Announcement.NEW

    def is_announced(self, span: Span, ordinal: int) -> bool:
        return (span, ordinal) in self._checksum_of

    def prove(self, span: Span, ordinal: int) -> None:
        """Record that the span of this block holds what was announced; idempotent."""
        if (span, ordinal) not in self._proven:
            self._proven.add((span, ordinal))
            self.num_unproven -= len(span.layers)

    def check_invariants(self) -> None:
        """Assert that the counts agree with the records."""
        assert self._proven <= self._checksum_of.keys()
        num_announced = sum(len(span.layers) for span, _ in self._checksum_of)
        num_proven = sum(len(span.layers) for span, _ in self._proven)
        assert self.num_unannounced == self._num_units - num_announced >= 0
        assert self.num_unproven == self._num_units - num_proven >= self.num_unannounced
