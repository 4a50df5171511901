"""The pieces of the world that schedules run in: workers, handoffs, messages, writes."""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from tandem.engine.schedule.block_pool import BlockPool
from tandem.runtime.wire.handoff_messages import Claim, Claimed, ClaimRefused, FirstToken, Settled
from tandem.transfer.handoff.actions import Span
from tandem.transfer.handoff.decode import DecodeHandoff
from tandem.transfer.handoff.prefill import PostedWrite, PrefillHandoff
from tests.transfer.schedules.memory import Flight, Words

WATCH_S = 0.05  # between looks at whether a claimant stands still

Plan = list[tuple[int, tuple[int, ...]]]
Place = Literal["fill", "quarantine", "decoding", "gone"]
Fate = Literal["posted", "landed", "failed"]


@dataclass(slots=True, eq=False)
class Process:
    """A prefill worker from its start to its end. `gone`: the decode worker cut its connection."""

    name: str
    epoch: int
    words: Words
    pool: BlockPool
    owner: dict[int, "Job"] = field(default_factory=dict)  # source block |-> whose it is
    jobs: list["Job"] = field(default_factory=list)
    alive: bool = True
    gone: bool = False
    frozen_until: float = 0.0
    seen_at: float = 0.0  # when the decode worker last sees that it stands still

    def freeze(self, until: float, luck: float) -> None:
        """Stop it; `luck` of [0, 1) is how close to its end the last look is."""
        if until <= self.frozen_until:
            return
        self.frozen_until = until
        self.seen_at = until - (1 - luck) * WATCH_S

    @property
    def who(self) -> tuple[str, str]:
        return self.name, f"e{self.epoch}"


@dataclass(slots=True, eq=False)
class Case:
    """One handoff, with what the test knows of it."""

    number: int
    machine: DecodeHandoff
    prompt: int
    blocks: list[int]
    num_cached: int
    place: Place = "fill"
    owner: "Job | None" = None  # the run that it was granted to
    fear_until: float = 0.0  # a write under any of its leases can land until then
    runs: list[int] = field(default_factory=list)  # who may have computed it
    has_settled: bool = False
    is_loose: bool = False  # it has settled with failed writes, which may still land
    is_cancelled: bool = False
    is_suspect: bool = False  # a bit was flipped, or its prefill worker lies
    num_emitted: int = 0  # first tokens that went to the client

    @property
    def claimant(self) -> Process | None:
        return None if self.owner is None else self.owner.process

    @property
    def fill(self) -> list[int]:
        return self.blocks[self.num_cached :]


@dataclass(slots=True, eq=False)
class Job:
    """One run of a ticket on a prefill worker.

    `plan`: (blocks, layers of each kind of block) computed step by step.
    """

    process: Process
    case: Case
    run: int
    plan: Plan
    machine: PrefillHandoff | None = None
    source: dict[int, int] = field(default_factory=dict)  # ordinal |-> own block
    num_layers: dict[int, int] = field(default_factory=dict)  # ordinal |-> computed by now
    to_post: deque[PostedWrite] = field(default_factory=deque)
    num_steps: int = 0
    is_telling: bool = False  # the first token is on its way
    ended: bool = False

    @property
    def name(self) -> bytes:
        return b"run %d" % self.run

    @property
    def can_go_on(self) -> bool:
        """It does not only wait."""
        machine = self.machine
        if machine is None:
            return False
        can_write = self.to_post or self.num_steps < len(self.plan)
        return bool(can_write) or not (machine.pinned or self.is_telling)


@dataclass(slots=True, eq=False)
class Write:
    """A write that was posted; it lands by `limit`, if it does."""

    job: Job
    posted: PostedWrite
    notice: bytes
    flight: Flight
    limit: float
    fate: Fate = "posted"
    is_half_posted: bool = False  # its sender was stopped meanwhile; it ends with its sender


@dataclass(slots=True, eq=False)
class Check:
    """One block to verify; `ok` once its checksum was computed."""

    case: Case
    span: Span
    ordinal: int
    block_id: int
    announced: int
    ok: bool | None = None


@dataclass(slots=True, eq=False)
class Message:
    """Something on the request plane, from or to a job."""

    kind: Literal["claim", "answer", "first", "settled", "cancel"]
    job: Job
    body: Claim | Claimed | ClaimRefused | FirstToken | Settled | None
    sent_at: float = 0.0
    notice: bytes = b""  # the second way of `settled`


@dataclass(slots=True, eq=False)
class Decoding:
    """A sequence of the decode worker whose KV is complete."""

    prompt: int
    blocks: list[int]
