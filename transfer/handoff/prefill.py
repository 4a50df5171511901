"""The prefill worker's side of one handoff: the writes that it may post, and its settling."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.runtime.wire.bounds import MAX_TEXT
from tandem.runtime.wire.handoff_messages import Claimed, Settled
from tandem.transfer.agents.rank_agent import Notice
from tandem.transfer.handoff.landed import (
    Landed,
    SettledNotice,
    encode_settled,
    landed_notice,
)
from tandem.transfer.layout import RankPair

# Limits the margin for long writes: without a limit, one slow hour would end all writing.
_MAX_MARGIN_OF_LEASE = 0.25


@dataclass(frozen=True, slots=True)
class PostedWrite:
    """A write for the transport: some layers of each ordinal into a block of the decode worker.

    The write must be posted before `post_before` (perf_counter seconds).
    """

    sequence_number: int
    ranks: RankPair
    layers: range
    ordinals: tuple[int, ...]
    remote_blocks: tuple[int, ...]
    post_before: float


class PrefillHandoff:
    """One granted claim.

    The lease counts from `claim_sent_at` (perf_counter seconds), the time at which the claim was
    sent, so that it ends here before it ends at the decode worker. Every block is written over
    each of `rank_pairs`, its layers in order. The source blocks must be kept while `pinned`. `run`
    is the same as in the claim.
    """

    def __init__(
        self,
        handoff_id: bytes,
        attempt: int,
        grant: Claimed,
        *,
        claim_sent_at: float,
        margin_ms: int,
        num_layers: int,
        rank_pairs: Sequence[RankPair],
        run: bytes = b"",
    ) -> None:
        assert rank_pairs, "a handoff needs a pair of ranks"
        self.handoff_id = handoff_id
        self.attempt = attempt
        self.grant = grant
        self.run = run
        self.num_completed = 0
        self.num_failed = 0
        self.error = ""  # the reason why nothing more is posted, if so
        self._margin_s = margin_ms / 1e3
        self._lease_s = grant.lease_ms / 1e3
        self._lease_until = claim_sent_at + self._lease_s
        self._num_layers = num_layers
        self._rank_pairs = tuple(rank_pairs)
        self._remote_block_of = dict(grant.fill)
        self._num_layers_posted = dict.fromkeys(self._remote_block_of, 0)
        self._num_unposted = len(self._remote_block_of)  # ordinals not posted to their last layer
        self._in_flight: set[int] = set()  # sequence numbers
        self._notices: list[tuple[int, bytes]] = []  # (decode rank, Landed) of completed writes
        self._num_posted = 0

    @property
    def pinned(self) -> bool:
        """The source blocks may still be read by a write."""
        return bool(self._in_flight) or (self.has_unposted and not self.error)

    @property
    def has_unposted(self) -> bool:
        """Some layer of some block has not been posted yet."""
        return self._num_unposted > 0

    def ready(self, num_blocks: int, num_layers: Sequence[int]) -> dict[range, list[int]]:
        """Return unposted layers |-> ordinals, up to these numbers of blocks and layers.

        The layers are those of blocks of each group: ordinals take turns through the groups.
        """
        found: dict[range, list[int]] = {}
        for ordinal, num_posted in self._num_layers_posted.items():
            num_ready = num_layers[ordinal % len(num_layers)]
            if ordinal < num_blocks and num_posted < num_ready:
                found.setdefault(range(num_posted, num_ready), []).append(ordinal)
        return found

    def post(
        self,
        ordinals: Sequence[int],
        layers: range,
        now: float,
        longest_write_s: float = 0.0,
    ) -> list[PostedWrite]:
        """Return the writes to post, one per pair of ranks; none when the lease is too short.

        The lease must outlast `now` by the margin and by the longest recent write. Each layer of
        an ordinal is written once, and after the layers below it.
        """
        longest_s = min(longest_write_s, _MAX_MARGIN_OF_LEASE * self._lease_s)
        post_before = self._lease_until - self._margin_s - longest_s
        if now >= post_before:
            self.stop("the write lease is over")
        if self.error:
            return []
        assert ordinals and len(set(ordinals)) == len(ordinals), "an ordinal is written once"
        assert layers and layers.stop <= self._num_layers, layers
        for ordinal in ordinals:
            assert self._num_layers_posted[ordinal] == layers.start, "a layer is written once"
            self._num_layers_posted[ordinal] = layers.stop
        if layers.stop == self._num_layers:
            self._num_unposted -= len(ordinals)
        remote_blocks = tuple(self._remote_block_of[ordinal] for ordinal in ordinals)
        writes = []
        for ranks in self._rank_pairs:
            number = self._num_posted
            self._num_posted += 1
            self._in_flight.add(number)
            writes.append(
                PostedWrite(number, ranks, layers, tuple(ordinals), remote_blocks, post_before)
            )
        return writes

    def landed_notice(self, write: PostedWrite) -> Notice:
        """Return the notice of `write`, which wants one checksum per ordinal."""
        landed = Landed(
            self.handoff_id,
            self.attempt,
            self.grant.secret,
            write.ranks.prefill_rank,
            write.sequence_number,
            write.layers,
            (),
        )
        return landed_notice(landed, write.ordinals)

    def settled(self, timeline_ms: dict[str, float] | None = None) -> Settled:
        """Return the message that nothing can land any more. Only when nothing is `pinned`."""
        assert not self.pinned, "a write can still land"
        return Settled(
            self.handoff_id,
            self.attempt,
            self.num_completed,
            self.num_failed,
            self.error[:MAX_TEXT],
            list(self._notices),
            timeline_ms or {},
            self.run,
        )

    def settled_notice(self) -> bytes:
        """Return `settled` for the transfer plane. Only when nothing is `pinned`."""
        assert not self.pinned, "a write can still land"
        num_failed = self.num_failed or (1 if self.error else 0)
        return encode_settled(
            SettledNotice(
                self.handoff_id, self.attempt, self.grant.secret, self.num_completed, num_failed
            )
        )

    def completed(self, write: PostedWrite, notice: bytes) -> None:
        """Record that the write and its `notice` have arrived at the decode worker."""
        self._in_flight.remove(write.sequence_number)
        self._notices.append((write.ranks.decode_rank, notice))
        self.num_completed += 1

    def failed(self, write: PostedWrite, error: str) -> None:
        """Record that the write can't land any more; post nothing else."""
        self._in_flight.remove(write.sequence_number)
        self.num_failed += 1
        self.stop(error)

    def stop(self, error: str) -> None:
        """Post nothing more, for the reason `error`."""
        assert error, "stopping has a reason"
        self.error = self.error or error

    def check_invariants(self) -> None:
        """Assert the invariants that hold between any two events."""
        assert self._num_posted == self.num_completed + self.num_failed + len(self._in_flight)
        assert len(self._notices) == self.num_completed
        assert self._num_layers_posted.keys() == self._remote_block_of.keys()
        unposted = [n for n in self._num_layers_posted.values() if n < self._num_layers]
        assert self._num_unposted == len(unposted)
        assert self.num_failed == 0 or self.error
