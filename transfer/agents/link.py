"""The measured cost of moving KV between two workers, and the decisions that follow from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tandem.runtime.errors import TransferError
from tandem.runtime.wire.cluster_messages import TransferMetadata
from tandem.transfer.agents.reactor import PeerRank
from tandem.transfer.layout import KvLayout, RankPair

# Numbers of groups of layers for a prompt's last chunk; each needs a table of descriptors.
GROUP_COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class LinkRates:
    """The rates between two workers' pools, with the checksums of both sides.

    A transfer of n bytes in d descriptors takes `overhead_s + d * descriptor_s + n * s_per_byte`.
    """

    overhead_s: float
    descriptor_s: float
    s_per_byte: float  # of a write
    read_s_per_byte: float
    wire_bytes_per_s: float  # of a write without checksums
    core_share: float  # of a transfer's time that computing loses

    def write_s(self, num_bytes: int, num_descriptors: int = 1) -> float:
        """Return the time of a write, from the decision to the notice of its end."""
        return self.overhead_s + num_descriptors * self.descriptor_s + num_bytes * self.s_per_byte

    def read_s(self, num_bytes: int, num_descriptors: int = 1) -> float:
        """Return the time of a READ, with the request for its checksums."""
        moving_s = num_descriptors * self.descriptor_s + num_bytes * self.read_s_per_byte
        return 2 * self.overhead_s + moving_s

    def exposed_s(
        self, num_groups: int, num_blocks: int, block_bytes: int, num_kinds: int = 1
    ) -> float:
        """Return the time that writing a last chunk in groups of layers adds to its prefill.

        It is the last group's write, and the computing time that the other writes take. A whole
        block is adjacent to the next one; a group of its layers is not. Where there are blocks of
        several kinds, which hold different layers, a group is two writes rather than one: the end
        of one kind and the begin of another.
        """
        num_bytes = num_blocks * block_bytes
        if num_groups == 1:
            return self.write_s(num_bytes)
        group_s = self.write_s(num_bytes // num_groups, num_blocks)
        if num_kinds > 1:
            group_s += self.overhead_s
        return group_s + (num_groups - 1) * group_s * self.core_share

    def num_groups(
        self, num_blocks: int, block_bytes: int, num_layers: int, num_kinds: int = 1
    ) -> int:
        """Return the number of groups of layers that delivers a last chunk soonest.

        A block of each of `num_kinds` has `num_layers` layers.
        """

        def exposed_s(count: int) -> float:
            return self.exposed_s(count, num_blocks, block_bytes, num_kinds)

        return min((n for n in GROUP_COUNTS if n <= num_kinds * num_layers), key=exposed_s)

    def min_streaming_blocks(
        self, block_bytes: int, num_layers: int, num_kinds: int = 1
    ) -> int | None:
        """Return the fewest blocks, a power of two, that are written by layers; None: none are."""
        for exponent in range(17):
            if self.num_groups(1 << exponent, block_bytes, num_layers, num_kinds) > 1:
                return 1 << exponent
        return None


@dataclass(slots=True)
class Link:
    """A peer that a worker has connected to."""

    peer: TransferMetadata
    layout: KvLayout  # the peer's
    rank_pairs: tuple[RankPair, ...]  # over which blocks are written
    read_pairs: tuple[RankPair, ...]  # over which blocks are READ
    rates: LinkRates | None = None  # measured over the first pair; None: no spare blocks
    is_broken: bool = False  # a transfer failed: connect again before the next

    @contextmanager
    def breaks(self) -> Iterator[None]:
        """Mark the link as broken when a transfer in the body fails: its connection is gone."""
        try:
            yield
        except TransferError:
            self.is_broken = True
            raise

    def peer_rank(self, ranks: RankPair) -> PeerRank:
        """Return the peer's rank of the pair."""
        return PeerRank(self.peer.instance_id, self.peer.epoch, ranks.decode_rank)
