"""The prefill worker's side of one handoff: which writes it may post, and when it has settled."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.runtime.messages import Claimed, Settled
from tandem.transfer.landed import encode_landed, encode_settled

_MAX_MARGIN_OF_LEASE = 0.25  # however long writes took: else a slow hour would end all writing


@dataclass(frozen=True, slots=True)
class PostedWrite:
    """A write to hand to the transport: D's block for each ordinal, and when it is too late."""

    sequence_number: int
    ordinals: tuple[int, ...]
    remote_blocks: tuple[int, ...]
    post_before: float  # perf_counter seconds


class PrefillHandoff:
    """One granted claim.

    `claim_sent_at` is when the claim left (perf_counter seconds): the lease counts from there, so
    that ours ends before D's. Source blocks stay pinned until `settled` is there.
    """

    def __init__(
        self,
        handoff_id: bytes,
        attempt: int,
        grant: Claimed,
        *,
        claim_sent_at: float,
        margin_ms: int,
    ) -> None:
        self.handoff_id = handoff_id
        self.attempt = attempt
        self.grant = grant
        self.num_completed = 0
        self.num_failed = 0
        self.error = ""  # why no more is posted, if that is so
        self._margin_s = margin_ms / 1e3
        self._lease_s = grant.lease_ms / 1e3
        self._lease_until = claim_sent_at + self._lease_s
        self._remote_block_of = dict(grant.fill)
        self._unposted = set(self._remote_block_of)
        self._in_flight: set[int] = set()  # sequence numbers
        self._num_posted = 0

    @property
    def settled(self) -> Settled | None:
        """The message that nothing can land any more; None while something can."""
        if self._in_flight or (self._unposted and not self.error):
            return None
        return Settled(
            self.handoff_id, self.attempt, self.num_completed, self.num_failed, self.error
        )

    @property
    def pinned(self) -> bool:
        """The source blocks may still be read by a write."""
        return self.settled is None

    @property
    def unposted(self) -> frozenset[int]:
        """Ordinals that no write was posted for."""
        return frozenset(self._unposted)

    def post(
        self, ordinals: Sequence[int], now: float, longest_write_s: float = 0.0
    ) -> PostedWrite | None:
        """Account for a write that is about to be posted; None when it must not be.

        The lease must outlast `now` by the margin and by the longest write measured of late. Each
        ordinal is written once.
        """
        longest_s = min(longest_write_s, _MAX_MARGIN_OF_LEASE * self._lease_s)
        post_before = self._lease_until - self._margin_s - longest_s
        if not self.error and now >= post_before:
            self.stop("the write lease is over")
        if self.error:
            return None
        assert ordinals and self._unposted.issuperset(ordinals), "an ordinal is written once"
        assert len(set(ordinals)) == len(ordinals), "an ordinal is written once"
        sequence_number = self._num_posted
        self._num_posted += 1
        self._in_flight.add(sequence_number)
        self._unposted.difference_update(ordinals)
        remote_blocks = tuple(self._remote_block_of[ordinal] for ordinal in ordinals)
        return PostedWrite(sequence_number, tuple(ordinals), remote_blocks, post_before)

    def landed_notice(self, write: PostedWrite, checksums: Sequence[int]) -> bytes:
        """What travels with `write`; one checksum per ordinal, of the source blocks."""
        return encode_landed(
            self.handoff_id,
            self.attempt,
            self.grant.secret,
            write.sequence_number,
            0 if self._unposted else self._num_posted,
            list(zip(write.ordinals, checksums, strict=True)),
        )

    def settled_notice(self) -> bytes:
        """`settled` for the transfer plane. Only once `settled` is there."""
        assert not self.pinned
        num_failed = self.num_failed or (1 if self.error else 0)
        return encode_settled(
            self.handoff_id, self.attempt, self.grant.secret, self.num_completed, num_failed
        )

    def completed(self, write: PostedWrite) -> None:
        """The transport says that the write is in D's memory."""
        self._in_flight.remove(write.sequence_number)
        self.num_completed += 1

    def failed(self, write: PostedWrite, error: str) -> None:
        """The transport says that the write can't land any more; nothing else is posted."""
        self._in_flight.remove(write.sequence_number)
        self.num_failed += 1
        self.stop(error)

    def stop(self, error: str) -> None:
        """Post nothing more: cancelled by D, or the prompt could not be computed."""
        assert error, "stopping has a reason"
        self.error = self.error or error

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        assert self._num_posted == self.num_completed + self.num_failed + len(self._in_flight)
        assert self._unposted <= self._remote_block_of.keys()
        assert self.num_failed == 0 or self.error
