"""The decode worker's side of one handoff, as a pure state machine.

```
ALLOCATED ─published─▶ QUEUED ─claim─▶ CLAIMED ─landed─▶ WRITING ─all proven─▶ ADMITTED
    └── cancel, deadline ─┴─▶ CLOSED ◀─quiesced─ CLOSING ◀── failure, deadline, cancel ──┘
```

Before a claim is granted nothing can be written, so giving up is immediate. Afterwards the blocks
stay in quarantine (CLOSING) until there is proof that nothing can land: `Settled` without a failed
write, the end of the write lease and its grace, or `peer_gone`. After a write that failed, its
system goes on to send what it was given although the connection is closed, and messages of other
connections may overtake that: within a machine for less than the grace, from another one for long.
Times are arguments, `time.perf_counter()` seconds. The worker carries out the returned actions in
order.
"""

import hmac
from collections import Counter
from enum import Enum
from typing import Literal

from tandem.runtime.errors import TransferError
from tandem.runtime.wire.handoff_messages import (
    CancelHandoff,
    Claim,
    Claimed,
    ClaimRefused,
    FirstToken,
    Settled,
)
from tandem.transfer.handoff.actions import (
    Abort,
    Action,
    Admit,
    PrefillLocally,
    ReleaseQuarantined,
    Retract,
    Span,
    Verify,
)
from tandem.transfer.handoff.causes import CloseCause, DropCause
from tandem.transfer.handoff.coverage import Announcement, Coverage
from tandem.transfer.handoff.landed import Landed, SettledNotice, decode_landed
from tandem.transfer.layout import KvLayout

# Linux tries for up to some 150 s to deliver what a closed connection still has to send
LATE_BYTES_S = 180.0


class HandoffState(Enum):
    ALLOCATED = "allocated"
    QUEUED = "queued"
    CLAIMED = "claimed"
    WRITING = "writing"
    ADMITTED = "admitted"
    CLOSING = "closing"
    CLOSED = "closed"


UNCLAIMED = (HandoffState.ALLOCATED, HandoffState.QUEUED)
_LIVE = (HandoffState.CLAIMED, HandoffState.WRITING)
_OPEN = (*UNCLAIMED, *_LIVE)
_Refusal = Literal["stale", "cancelled", "expired"]
_REFUSALS: dict[CloseCause, _Refusal] = {
    CloseCause.CANCELLED: "cancelled",
    CloseCause.DEADLINE: "expired",
}


class DecodeHandoff:
    """One attempt of one handoff. `grant` answers a claim: secret, lease, prompt and blocks.

    The worker waits until `deadline`; a write may land up to `grace_ms` after the end of its lease.
    A block is proven when all of its layers of `layout` are, over every pair of ranks that blocks
    are written over. Without `verify`, blocks that have landed count as proven. Without
    `awaits_first`, no first token comes, because the decode worker computes the prompt's last token
    itself.
    """

    def __init__(
        self,
        handoff_id: bytes,
        attempt: int,
        grant: Claimed,
        *,
        deadline: float,
        grace_ms: int,
        layout: KvLayout,
        verify: bool = True,
        awaits_first: bool = True,
    ) -> None:
        assert grant.fill, "a handoff without blocks to fill"
        self.handoff_id = handoff_id
        self.attempt = attempt
        self.grant = grant
        self.deadline = deadline
        self.state = HandoffState.ALLOCATED
        self.close_cause: CloseCause | None = None
        self.claimant: tuple[str, str] | None = None  # (prefill instance, epoch)
        self.claimant_tp_size = 1
        self._granted_to: tuple[str, str, bytes] | None = None  # (instance, epoch, run)
        self.first: FirstToken | None = None
        self.dropped: Counter[DropCause] = Counter()  # messages that were not applied
        self._verify = verify
        self._awaits_first = awaits_first
        self._grace_s = grace_ms / 1e3
        self._lease_until = 0.0
        self._is_afar = False  # the claimant is on another machine
        self._block_of = dict(grant.fill)  # ordinal |-> block id
        self._layout = layout
        self._coverage: Coverage | None = None  # once it is claimed
        self._settled = False

    @property
    def is_live(self) -> bool:
        """The handoff is claimed, and neither admitted nor given up."""
        return self.state in _LIVE

    @property
    def all_landed(self) -> bool:
        """Every block has been announced; not every block need be proven."""
        return self._coverage is not None and self._coverage.num_unannounced == 0

    @property
    def all_proven(self) -> bool:
        """Every block may be read."""
        return self._coverage is not None and self._coverage.num_unproven == 0

    @property
    def complete(self) -> bool:
        """Every block is proven and the first token is here, if one comes."""
        return self.all_proven and (self.first is not None or not self._awaits_first)

    @property
    def may_reuse_blocks(self) -> bool:
        """No write into the fill blocks can still land."""
        return self.state in (HandoffState.ADMITTED, HandoffState.CLOSED)

    @property
    def next_tick(self) -> float | None:
        """The time of the next `tick`; None once nothing is due any more."""
        if self.state in UNCLAIMED:
            return self.deadline
        if self.state in _LIVE:
            return min(self.deadline, self._lease_until + self._grace_s)
        if self.state is HandoffState.CLOSING:
            return self._quiet_at
        return None

    def published(self) -> None:
        """Record that the ticket is on the queue."""
        if self.state is HandoffState.ALLOCATED:
            self.state = HandoffState.QUEUED

    def claim(self, claim: Claim, now: float, *, is_afar: bool = False) -> Claimed | ClaimRefused:
        """Grant the write lease to one prefill worker; a repeated claim gets the same answer.

        A repeated claim lengthens the lease, because its answer restarts the prefill worker's
        clock. It must come from the same run of the ticket: two runs would settle for each other.
        `is_afar`: the prefill worker is on another machine.
        """
        claimant = (claim.prefill_instance, claim.prefill_epoch, claim.run)
        if (claim.handoff_id, claim.attempt) != (self.handoff_id, self.attempt):
            return self._refuse("stale")
        if self.state in (HandoffState.CLOSING, HandoffState.CLOSED):
            assert self.close_cause is not None
            return self._refuse(_REFUSALS.get(self.close_cause, "stale"))
        if now >= self.deadline:
            return self._refuse("expired")
        try:
            rank_pairs = self._layout.rank_pairs_from(claim.tp_size)
        except TransferError:
            return self._refuse("stale")
        if self.state in UNCLAIMED:
            self.state = HandoffState.CLAIMED
            self._granted_to = claimant
            self.claimant = claimant[:2]
            self.claimant_tp_size = claim.tp_size
            self._is_afar = is_afar
            self._coverage = Coverage(len(self._block_of), self._layout.num_layers, rank_pairs)
        elif self.state not in _LIVE or self._granted_to != claimant or self._settled:
            return self._refuse("stale")
        self._lease_until = now + self.grant.lease_ms / 1e3
        return self.grant

    def is_ours(self, handoff_id: bytes, attempt: int, secret: bytes) -> bool:
        """Return True for a message with the secret of the grant; count any other."""
        if (handoff_id, attempt) != (self.handoff_id, self.attempt):
            self.dropped[DropCause.STALE] += 1
            return False
        if not hmac.compare_digest(secret, self.grant.secret):
            self.dropped[DropCause.BAD_SECRET] += 1
            return False
        return True

    def landed(self, notice: Landed, now: float, decode_rank: int = 0) -> list[Action]:
        """Handle the notice of a write into `decode_rank`; the secret authenticates its sender."""
        if not self.is_ours(notice.handoff_id, notice.attempt, notice.secret):
            return []
        if self.state not in _LIVE or now > self._lease_until + self._grace_s:
            return self._drop(DropCause.LATE)
        return self._take_in(notice, decode_rank)

    def _take_in(self, notice: Landed, decode_rank: int) -> list[Action]:
        assert self._coverage is not None
        span = Span(notice.prefill_rank, decode_rank, notice.layers)
        if not self._coverage.includes(span):
            self.dropped[DropCause.UNKNOWN_SPAN] += 1
            return self._violated(f"wrote {span}, which it has no part in")
        self.state = HandoffState.WRITING
        fresh: list[tuple[int, int, int]] = []
        for ordinal, checksum in notice.blocks:
            if ordinal not in self._block_of:
                self.dropped[DropCause.UNKNOWN_ORDINAL] += 1
                return self._violated(f"wrote ordinal {ordinal}, which it was not given")
            match self._coverage.announce(span, ordinal, checksum):
                case Announcement.NEW:
                    fresh.append((ordinal, self._block_of[ordinal], checksum))
                case Announcement.REPEATED:
                    self.dropped[DropCause.DUPLICATE] += 1
                case Announcement.CONFLICTING:
                    self.dropped[DropCause.CONFLICT] += 1
                    return self._violated(f"announced ordinal {ordinal} twice, differently")
        if not fresh:
            return []
        if self._verify:
            return [Verify(span, tuple(fresh))]
        for ordinal, _, _ in fresh:
            self._coverage.prove(span, ordinal)
        return self._admit_if_complete()

    def verified(self, span: Span, ordinal: int, ok: bool) -> list[Action]:
        """Handle the result of one block of a `Verify`."""
        if self.state not in _LIVE:
            return self._drop(DropCause.LATE)
        assert self._coverage is not None
        assert self._coverage.is_announced(span, ordinal), "verified() answers a Verify"
        if not ok:
            self.dropped[DropCause.CHECKSUM] += 1
            detail = f"checksum of ordinal {ordinal} from {self._claimant_name} does not match"
            return self._close(CloseCause.CORRUPT, detail)
        self._coverage.prove(span, ordinal)
        return self._admit_if_complete()

    def first_token(self, first: FirstToken) -> list[Action]:
        """Handle the sampled token; afterwards `self.first` is `first` if it was accepted."""
        if not self.is_ours(first.handoff_id, first.attempt, first.secret):
            return []
        if self.state not in _LIVE:
            return self._drop(DropCause.LATE)
        if not self._is_claimant(first.run):
            return self._drop(DropCause.NOT_THE_CLAIMANT)
        if self.first is not None:
            return self._drop(DropCause.DUPLICATE)
        self.first = first
        return self._admit_if_complete()

    def settled(self, settled: Settled, now: float) -> list[Action]:
        """Handle the request plane's message that every write is complete or has failed.

        The message repeats the notices of the complete writes, so a lost notice costs nothing.
        """
        if (settled.handoff_id, settled.attempt) != (self.handoff_id, self.attempt):
            return self._drop(DropCause.STALE)
        if not self._is_claimant(settled.run):
            return self._drop(DropCause.NOT_THE_CLAIMANT)
        actions: list[Action] = []
        if not settled.num_failed and not settled.error:
            for decode_rank, data in settled.notices:
                notice = decode_landed(data)
                if notice is not None and self.state in _LIVE:
                    actions += self.landed(notice, now, decode_rank)
        if not self.all_landed and not settled.error:
            error = f"{self._claimant_name} settled and had not written everything"
            return actions + self._settle(settled.num_failed, error, CloseCause.INCOMPLETE)
        return actions + self._settle(settled.num_failed, settled.error)

    def settled_notice(self, notice: SettledNotice) -> list[Action]:
        """Handle the transfer plane's message that every write is complete or has failed."""
        if not self.is_ours(notice.handoff_id, notice.attempt, notice.secret):
            return []
        return self._settle(notice.num_failed, "")

    def cancel(self) -> list[Action]:
        """End the handoff of a request that is over."""
        if self.state in _OPEN:
            return self._close(CloseCause.CANCELLED, "cancelled")
        return []

    def fail(self, cause: CloseCause, detail: str) -> list[Action]:
        """Give the remote prefill up for a cause that the worker has found."""
        if self.state in _OPEN:
            return self._close(cause, detail)
        return []

    def peer_lost(self, prefill_instance: str) -> list[Action]:
        """Give up because the claimant does not answer. This is no proof that nothing can land.

        A claimant that has settled may leave: all of its writes have landed or failed.
        """
        if self._settled or self.state not in _LIVE:
            return []
        assert self.claimant is not None
        if prefill_instance != self.claimant[0]:
            return []
        return self._close(CloseCause.PEER_LOST, f"{self._claimant_name} was lost")

    def peer_gone(self, prefill_instance: str, prefill_epoch: str) -> list[Action]:
        """Handle the proof that all processes of a worker are dead: no write can land any more."""
        if self.claimant != (prefill_instance, prefill_epoch):
            return []
        return self._quiesced(CloseCause.PEER_GONE, f"{self._claimant_name} is gone")

    def claimant_stopped(self, now: float) -> None:
        """Restart the grace period, because a process of the claimant is stopped.

        A post that the process has begun may still be made. The grace period therefore ends only
        after the process was seen running again.
        """
        self._lease_until = max(self._lease_until, now)

    def tick(self, now: float) -> list[Action]:
        """Apply the deadline, the lease and its grace."""
        if self.state not in UNCLAIMED and now > self._quiet_at:
            return self._quiesced(CloseCause.LEASE_EXPIRED, "lease expired")
        if self.state in _LIVE and now > self._lease_until + self._grace_s:
            return self._close(CloseCause.LEASE_EXPIRED, "lease expired")
        if now >= self.deadline and self.state in _OPEN:
            return self._close(CloseCause.DEADLINE, "deadline")
        return []

    def check_invariants(self) -> None:
        """Assert the invariants that hold between any two events."""
        if self._coverage is not None:
            self._coverage.check_invariants()
        assert len(set(self._block_of.values())) == len(self.grant.fill), "a block given twice"
        if self.state in UNCLAIMED:
            assert self.claimant is None and self._coverage is None and self.first is None
        if self.state is HandoffState.ADMITTED:
            assert self.complete
        if self.state is HandoffState.CLOSING:
            assert self.claimant is not None and not self._settled
        if self.state in (HandoffState.CLOSING, HandoffState.CLOSED):
            assert self.close_cause is not None

    @property
    def _quiet_at(self) -> float:
        """The time after which nothing can land, whatever became of the claimant."""
        late_s = max(LATE_BYTES_S, self._grace_s) if self._is_afar else self._grace_s
        return self._lease_until + late_s

    @property
    def _claimant_name(self) -> str:
        return ".".join(self.claimant or ())

    def _is_claimant(self, run: bytes) -> bool:
        return self._granted_to is None or run == self._granted_to[2]

    def _settle(
        self, num_failed: int, error: str, cause: CloseCause = CloseCause.FAILED
    ) -> list[Action]:
        if self.state in UNCLAIMED:
            return self._drop(DropCause.UNCLAIMED)
        if self._settled or self.may_reuse_blocks:
            return self._drop(DropCause.DUPLICATE)
        if num_failed:  # it is no proof
            error = error or f"{num_failed} writes of {self._claimant_name} failed"
            return self._close(cause, error) if self.state in _LIVE else []
        self._settled = True
        if self.state is HandoffState.CLOSING or error:
            return self._quiesced(cause, error)
        return []  # everything is written; notices may still be under way

    def _admit_if_complete(self) -> list[Action]:
        if not self.complete:
            return []
        self.state = HandoffState.ADMITTED
        return [Admit(self.first)]

    def _violated(self, deed: str) -> list[Action]:
        return self._close(CloseCause.VIOLATION, f"{self._claimant_name} {deed}")

    def _close(self, cause: CloseCause, detail: str) -> list[Action]:
        """Give up from any state before ADMITTED; quarantine blocks that may still be written."""
        self.close_cause = cause
        quarantined = self.state in _LIVE and not self._settled
        self.state = HandoffState.CLOSING if quarantined else HandoffState.CLOSED
        actions: list[Action] = [PrefillLocally(cause, detail, quarantined)]
        if cause is CloseCause.CANCELLED:
            actions = [Abort(quarantined)]
        if quarantined:
            assert self.claimant is not None
            actions.append(Retract(self.claimant[0], CancelHandoff(self.handoff_id, self.attempt)))
        return actions

    def _quiesced(self, cause: CloseCause, detail: str) -> list[Action]:
        """Leave quarantine, or give up without one: nothing can land any more."""
        if self.state is HandoffState.CLOSING:
            self.state = HandoffState.CLOSED
            return [ReleaseQuarantined(tuple(self._block_of.values()))]
        if self.state in _LIVE:
            self.close_cause = cause
            self.state = HandoffState.CLOSED
            return [PrefillLocally(cause, detail, quarantined=False)]
        return []

    def _refuse(self, reason: _Refusal) -> ClaimRefused:
        self.dropped[DropCause(f"claim: {reason}")] += 1
        return ClaimRefused(reason)

    def _drop(self, cause: DropCause) -> list[Action]:
        self.dropped[cause] += 1
        return []
