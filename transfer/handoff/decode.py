"""The decode worker's side of one handoff, as a pure state machine.

```
ALLOCATED ─published─▶ QUEUED ─claim─▶ CLAIMED ─landed─▶ WRITING ─all proven─▶ ADMITTED
    └── cancel, deadline ─┴─▶ CLOSED ◀─quiesced─ CLOSING ◀── failure, deadline, cancel ──┘
```

Before a claim is granted nothing can be written, so giving up is immediate. After it, the blocks
stay in quarantine (CLOSING) until there is proof that nothing can land: `Settled`, the end of the
write lease and its grace, or `peer_gone`. Time comes in as an argument: `time.perf_counter()`
seconds. The worker carries out the actions that come back, in order.
"""

import hmac
from collections import Counter
from enum import Enum
from typing import Literal

from tandem.runtime.messages import CancelHandoff, Claim, Claimed, ClaimRefused, FirstToken, Settled
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
from tandem.transfer.handoff.landed import Landed, SettledNotice, decode_landed


class HandoffState(Enum):
    ALLOCATED = "allocated"
    QUEUED = "queued"
    CLAIMED = "claimed"
    WRITING = "writing"
    ADMITTED = "admitted"
    CLOSING = "closing"
    CLOSED = "closed"


_UNCLAIMED = (HandoffState.ALLOCATED, HandoffState.QUEUED)
_LIVE = (HandoffState.CLAIMED, HandoffState.WRITING)
_Refusal = Literal["stale", "cancelled", "expired"]
_REFUSALS: dict[str, _Refusal] = {"cancelled": "cancelled", "deadline": "expired"}


class DecodeHandoff:
    """One attempt of one handoff. `grant` is what a claim gets: secret, lease, prompt and blocks.

    `deadline` is when the worker stops waiting; `grace_ms` is how long after a lease's end a write
    is still feared. Every block has `num_layers` layers in each of `tp_size` ranks, and is proven
    when all of them are, from every rank of P that has heads for them. With `verify` off, what has
    landed counts as proven.
    """

    def __init__(
        self,
        handoff_id: bytes,
        attempt: int,
        grant: Claimed,
        *,
        deadline: float,
        grace_ms: int,
        num_layers: int,
        tp_size: int = 1,
        verify: bool = True,
    ) -> None:
        assert grant.fill, "a handoff without blocks to fill"
        self.handoff_id = handoff_id
        self.attempt = attempt
        self.grant = grant
        self.deadline = deadline
        self.state = HandoffState.ALLOCATED
        self.close_reason = ""
        self.claimant: tuple[str, str] | None = None  # prefill instance, its epoch
        self.claimant_tp_size = 1
        self._granted_to: tuple[str, str, bytes] | None = None  # claimant, its run of the ticket
        self.first: FirstToken | None = None
        self.dropped: Counter[str] = Counter()  # why |-> how many messages were not applied
        self._verify = verify
        self._grace_s = grace_ms / 1e3
        self._lease_until = 0.0
        self._block_of = dict(grant.fill)  # ordinal |-> block id
        self._num_layers = num_layers
        self._tp_size = tp_size
        self._num_rank_pairs = 0  # that write; known once claimed
        self._checksum_of: dict[tuple[Span, int], int] = {}  # (span, ordinal) |-> as announced
        # (P's rank, ours, ordinal) |-> layers, a bit each
        self._announced: dict[tuple[int, int, int], int] = {}
        self._proven: set[tuple[Span, int]] = set()
        self._num_unannounced = 0  # layers of blocks, over all pairs of ranks
        self._num_unproven = 0
        self._settled = False

    @property
    def is_live(self) -> bool:
        """Claimed, and neither admitted nor given up."""
        return self.state in _LIVE

    @property
    def all_landed(self) -> bool:
        """Every block was announced; not all of them need be proven."""
        return self.claimant is not None and self._num_unannounced == 0

    @property
    def all_proven(self) -> bool:
        """Every block may be read."""
        return self.claimant is not None and self._num_unproven == 0

    @property
    def complete(self) -> bool:
        """Every block is proven and the first token is here."""
        return self.first is not None and self.all_proven

    @property
    def may_reuse_blocks(self) -> bool:
        """Nothing that was ever announced for the fill blocks can still land."""
        return self.state in (HandoffState.ADMITTED, HandoffState.CLOSED)

    @property
    def next_tick(self) -> float | None:
        """When `tick` has something to do next, if nothing happens before."""
        if self.state in _UNCLAIMED:
            return self.deadline
        if self.state in _LIVE:
            return min(self.deadline, self._lease_until + self._grace_s)
        if self.state is HandoffState.CLOSING:
            return self._lease_until + self._grace_s
        return None

    def published(self) -> None:
        """The job is on the queue."""
        if self.state is HandoffState.ALLOCATED:
            self.state = HandoffState.QUEUED

    def claim(self, claim: Claim, now: float) -> Claimed | ClaimRefused:
        """Grant the write lease to one prefill worker; asking again gets the same answer.

        A repeated claim lengthens the lease, because its answer starts P's clock anew. It is of the
        same run of the ticket: two runs would settle for each other.
        """
        who = (claim.prefill_instance, claim.prefill_epoch, claim.run)
        if (claim.handoff_id, claim.attempt) != (self.handoff_id, self.attempt):
            return self._refuse("stale")
        if self.state in (HandoffState.CLOSING, HandoffState.CLOSED):
            return self._refuse(_REFUSALS.get(self.close_reason, "stale"))
        if now >= self.deadline:
            return self._refuse("expired")
        wide, narrow = max(claim.tp_size, self._tp_size), min(claim.tp_size, self._tp_size)
        if narrow < 1 or wide % narrow:
            return self._refuse("stale")
        if self.state in _UNCLAIMED:
            self.state = HandoffState.CLAIMED
            self._granted_to = who
            self.claimant = who[:2]
            self.claimant_tp_size = claim.tp_size
            self._num_rank_pairs = max(self._tp_size, claim.tp_size)
            self._num_unannounced = self._num_rank_pairs * self._num_layers * len(self._block_of)
            self._num_unproven = self._num_unannounced
        elif self.state not in _LIVE or self._granted_to != who or self._settled:
            return self._refuse("stale")
        self._lease_until = now + self.grant.lease_ms / 1e3
        return self.grant

    def landed(self, notice: Landed, now: float, decode_rank: int = 0) -> list[Action]:
        """A write into `decode_rank` is complete, says whoever knows the secret."""
        if not self._is_ours(notice.handoff_id, notice.attempt, notice.secret):
            return []
        if self.state not in _LIVE or now > self._lease_until + self._grace_s:
            return self._drop("late")
        return self._take_in(notice, decode_rank)

    def _take_in(self, notice: Landed, decode_rank: int) -> list[Action]:
        span = Span(notice.prefill_rank, decode_rank, notice.layers)
        if not self._is_sane(span):
            self.dropped["unknown span"] += 1
            return self._fail(f"{self._who} wrote {span}, which it has no part in")
        self.state = HandoffState.WRITING
        fresh: list[tuple[int, int, int]] = []
        for ordinal, checksum in notice.blocks:
            if ordinal not in self._block_of:
                self.dropped["unknown ordinal"] += 1
                return self._fail(f"{self._who} wrote ordinal {ordinal}, which it was not given")
            known = self._checksum_of.get((span, ordinal))
            if known == checksum:
                self.dropped["duplicate"] += 1
            elif known is not None or not self._announce(span, ordinal):
                self.dropped["conflict"] += 1
                return self._fail(f"{self._who} announced ordinal {ordinal} twice, differently")
            else:
                self._checksum_of[span, ordinal] = checksum
                fresh.append((ordinal, self._block_of[ordinal], checksum))
        if not fresh:
            return []
        if self._verify:
            return [Verify(span, tuple(fresh))]
        for ordinal, _, _ in fresh:
            self._prove(span, ordinal)
        return self._admit_if_complete()

    def verified(self, span: Span, ordinal: int, ok: bool) -> list[Action]:
        """The answer to one block of a `Verify`."""
        if self.state not in _LIVE:
            return self._drop("late")
        assert (span, ordinal) in self._checksum_of, "verified() answers a Verify"
        if not ok:
            self.dropped["checksum"] += 1
            return self._fail(f"checksum of ordinal {ordinal} from {self._who} does not match")
        self._prove(span, ordinal)
        return self._admit_if_complete()

    def first_token(self, first: FirstToken) -> list[Action]:
        """P's sampled token; `first` tells whether it was taken, so that it is emitted once."""
        if (first.handoff_id, first.attempt) != (self.handoff_id, self.attempt):
            return self._drop("stale")
        if self.state not in _LIVE:
            return self._drop("late")
        if self.first is not None:
            return self._drop("duplicate")
        self.first = first
        return self._admit_if_complete()

    def settled(self, settled: Settled, now: float) -> list[Action]:
        """Every write of P is complete or failed; by the request plane.

        It carries the notices of the complete ones once more, so that a lost one costs nothing.
        """
        if (settled.handoff_id, settled.attempt) != (self.handoff_id, self.attempt):
            return self._drop("stale")
        if self._granted_to is not None and settled.run != self._granted_to[2]:
            return self._drop("not the claimant")
        actions: list[Action] = []
        if not settled.num_failed and not settled.error:
            for decode_rank, data in settled.notices:
                notice = decode_landed(data)
                if notice is not None and self.state in _LIVE:
                    actions += self.landed(notice, now, decode_rank)
        if self.state in _LIVE and not self._settled and self._num_unannounced:
            error = settled.error or f"{self._who} settled and had not written everything"
            return actions + self._settle(settled.num_failed, error)
        return actions + self._settle(settled.num_failed, settled.error)

    def settled_notice(self, notice: SettledNotice) -> list[Action]:
        """Every write of P is complete or failed; by the transfer plane."""
        if not self._is_ours(notice.handoff_id, notice.attempt, notice.secret):
            return []
        return self._settle(notice.num_failed, "")

    def cancel(self) -> list[Action]:
        """The request is not wanted any more."""
        if self.state in _UNCLAIMED or self.state in _LIVE:
            return self._close("cancelled", local=False)
        return []

    def fail(self, reason: str) -> list[Action]:
        """The worker gives the remote prefill up, as when the job can't be published."""
        if self.state in _UNCLAIMED or self.state in _LIVE:
            return self._close(reason, local=True)
        return []

    def peer_lost(self, prefill_instance: str) -> list[Action]:
        """The claimant does not answer; it may be stopped, and wake. No proof of quiescence.

        Once it has settled it may leave: all it wrote is here or on its way.
        """
        if self._settled:
            return []
        if (
            self.state in _LIVE
            and self.claimant is not None
            and prefill_instance == self.claimant[0]
        ):
            return self._close(f"{self._who} was lost", local=True)
        return []

    def peer_gone(self, prefill_instance: str, prefill_epoch: str) -> list[Action]:
        """That process is dead and its connection torn down: nothing of it can land any more."""
        if self.claimant != (prefill_instance, prefill_epoch):
            return []
        return self._quiesced(f"{self._who} is gone")

    def claimant_stopped(self, now: float) -> None:
        """The claimant's process stands still: a post that it was in the middle of may come yet.

        So the time of grace begins anew; it ends only after the process was seen going on.
        """
        if self.claimant is not None:
            self._lease_until = max(self._lease_until, now)

    def tick(self, now: float) -> list[Action]:
        """Apply the deadline, the lease and its grace."""
        if self.state not in _UNCLAIMED and now > self._lease_until + self._grace_s:
            return self._quiesced("lease expired")
        if now >= self.deadline and (self.state in _UNCLAIMED or self.state in _LIVE):
            return self._close("deadline", local=True)
        return []

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        assert self._proven <= self._checksum_of.keys()
        assert all(ordinal in self._block_of for _, ordinal in self._checksum_of)
        num_units = self._num_rank_pairs * self._num_layers * len(self._block_of)
        num_announced = sum(len(span.layers) for span, _ in self._checksum_of)
        num_proven = sum(len(span.layers) for span, _ in self._proven)
        assert self._num_unannounced == num_units - num_announced >= 0
        assert self._num_unproven == num_units - num_proven >= self._num_unannounced
        assert len(set(self._block_of.values())) == len(self.grant.fill), "a block given twice"
        if self.state in _UNCLAIMED:
            assert self.claimant is None and not self._checksum_of and self.first is None
        if self.state is HandoffState.ADMITTED:
            assert self.complete
        if self.state is HandoffState.CLOSING:
            assert self.claimant is not None and not self._settled
        if self.state in (HandoffState.CLOSING, HandoffState.CLOSED):
            assert self.close_reason

    @property
    def _who(self) -> str:
        return ".".join(self.claimant) if self.claimant else "nobody"

    def _is_ours(self, handoff_id: bytes, attempt: int, secret: bytes) -> bool:
        if (handoff_id, attempt) != (self.handoff_id, self.attempt):
            self.dropped["stale"] += 1
            return False
        if not hmac.compare_digest(secret, self.grant.secret):
            self.dropped["bad secret"] += 1
            return False
        return True

    def _is_sane(self, span: Span) -> bool:
        """The span exists, and those two ranks have heads in common."""
        wide, narrow = span.prefill_rank, span.decode_rank
        if self._tp_size > self.claimant_tp_size:
            wide, narrow = narrow, wide
        num_wide = max(self._tp_size, self.claimant_tp_size)
        per_narrow = num_wide // min(self._tp_size, self.claimant_tp_size)
        in_layers = 0 <= span.layers.start < span.layers.stop <= self._num_layers
        return in_layers and 0 <= wide < num_wide and wide // per_narrow == narrow

    def _announce(self, span: Span, ordinal: int) -> bool:
        """Note that these layers are here; False when some of them were already."""
        key = (span.prefill_rank, span.decode_rank, ordinal)
        mask = (1 << span.layers.stop) - (1 << span.layers.start)
        known = self._announced.get(key, 0)
        if known & mask:
            return False
        self._announced[key] = known | mask
        self._num_unannounced -= len(span.layers)
        return True

    def _prove(self, span: Span, ordinal: int) -> None:
        if (span, ordinal) not in self._proven:
            self._proven.add((span, ordinal))
            self._num_unproven -= len(span.layers)

    def _settle(self, num_failed: int, error: str) -> list[Action]:
        if self.state in _UNCLAIMED:
            return self._drop("unclaimed")
        if self._settled or self.may_reuse_blocks:
            return self._drop("duplicate")
        self._settled = True
        if self.state is HandoffState.CLOSING or num_failed or error:
            return self._quiesced(error or f"{num_failed} writes of {self._who} failed")
        return []  # all is written; notices of it may still be on their way

    def _admit_if_complete(self) -> list[Action]:
        if not self.complete:
            return []
        assert self.first is not None
        self.state = HandoffState.ADMITTED
        return [Admit(self.first)]

    def _fail(self, reason: str) -> list[Action]:
        return self._close(reason, local=True)

    def _close(self, reason: str, *, local: bool) -> list[Action]:
        """Give up from any state before ADMITTED; blocks that may be written go to quarantine."""
        self.close_reason = reason
        quarantined = self.state in _LIVE and not self._settled
        self.state = HandoffState.CLOSING if quarantined else HandoffState.CLOSED
        actions: list[Action] = [
            PrefillLocally(reason, quarantined) if local else Abort(quarantined)
        ]
        if quarantined:
            assert self.claimant is not None
            actions.append(Retract(self.claimant[0], CancelHandoff(self.handoff_id, self.attempt)))
        return actions

    def _quiesced(self, reason: str) -> list[Action]:
        """Nothing can land any more: leave quarantine, or give up without it."""
        if self.state is HandoffState.CLOSING:
            self.state = HandoffState.CLOSED
            return [ReleaseQuarantined(tuple(self._block_of.values()))]
        if self.state in _LIVE:
            self.close_reason = reason
            self.state = HandoffState.CLOSED
            return [PrefillLocally(reason, quarantined=False)]
        return []

    def _refuse(self, reason: _Refusal) -> ClaimRefused:
        self.dropped[f"claim: {reason}"] += 1
        return ClaimRefused(reason)

    def _drop(self, why: str) -> list[Action]:
        self.dropped[why] += 1
        return []
