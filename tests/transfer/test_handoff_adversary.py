"""Both sides of the handoff over a loopback transport that an adversary schedules.

Blocks that are free hold a canary; a write that lands in one breaks I1. An admitted sequence's
blocks must hold exactly what was computed (I2), and every block is in one place (I6).
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.runtime.messages import Claim, Claimed, FirstToken, SamplingParams, pack_tokens
from tandem.transfer.actions import (
    Abort,
    Action,
    Admit,
    PrefillLocally,
    ReleaseQuarantined,
    Retract,
    Verify,
)
from tandem.transfer.handoff import DecodeHandoff, HandoffState, PostedWrite, PrefillHandoff
from tandem.transfer.landed import decode_landed, decode_settled
from tandem.transfer.loopback import LoopbackFabric, LoopbackTransport, PendingWrite
from tandem.transfer.transport import BlockGrid

NUM_BLOCKS = 12
BLOCK_BYTES = 32
LEASE_MS, MARGIN_MS, GRACE_MS = 1000, 100, 200
LONGEST_FLIGHT_S = (MARGIN_MS + GRACE_MS) / 1e3  # the physical promise that leases rest on
DEADLINE_S = 1.5

STAGES = ("post", "land", "land", "hear", "verify", "first", "settle", "end")

pick = st.integers(0, 1_000_000)


def canary(block_id: int) -> bytes:
    return bytes([0xC0 + block_id]) * BLOCK_BYTES


@dataclass
class Flight:
    """A posted write, as P and the adversary know it."""

    write: PendingWrite
    posted: PostedWrite
    side: "Side"
    posted_at: float


@dataclass
class Side:
    """P's view of one claim."""

    machine: PrefillHandoff
    source: dict[int, int]  # ordinal |-> P's block


@dataclass
class Case:
    """One handoff, with everything that the test knows about it."""

    machine: DecodeHandoff
    blocks: list[int]
    content: dict[int, bytes]  # ordinal |-> what P computes
    place: str = "fill"  # fill | quarantine | decoding | gone
    to_verify: list[tuple[int, int, int]] = field(default_factory=list)
    retracts: int = 0
    side: Side | None = None
    ended_local: int = 0
    num_emitted: int = 0  # first tokens that went to the client


class Handoffs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.d_pool = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
        self.p_pool = torch.zeros(NUM_BLOCKS * 4, BLOCK_BYTES, dtype=torch.uint8)
        self.fabric = LoopbackFabric(held=True)
        self.d = LoopbackTransport("d", self.fabric)
        self.d.register(BlockGrid(self.d_pool.data_ptr(), BLOCK_BYTES, NUM_BLOCKS, "DRAM", 0))
        self.epoch = 0
        self.start_prefill_worker()
        self.free = list(range(NUM_BLOCKS))
        self.cases: list[Case] = []
        self.flights: list[Flight] = []
        self.inbox: list[bytes] = []
        for block_id in self.free:
            self.put(self.d_pool, block_id, canary(block_id))
        self.allocate_blocks(3, published=True)
        self.allocate_blocks(2, published=False)

    # ---- the two workers, as small as they get --------------------------------------------

    def start_prefill_worker(self) -> None:
        self.epoch += 1
        self.p = LoopbackTransport(f"p.{self.epoch}", self.fabric)
        grid = BlockGrid(self.p_pool.data_ptr(), BLOCK_BYTES, len(self.p_pool), "DRAM", 0)
        self.p.register(grid)
        self.p.add_peer(b"d", self.d.grid)

    def put(self, pool: torch.Tensor, block_id: int, data: bytes) -> None:
        pool[block_id] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def get(self, block_id: int) -> bytes:
        return bytes(self.d_pool[block_id].tolist())

    def set_free(self, case: Case) -> None:
        """The blocks go to whoever needs them next: anything written from now on is damage."""
        case.place = "gone"
        self.free += case.blocks
        for block_id in case.blocks:
            self.put(self.d_pool, block_id, canary(block_id))

    def carry_out(self, case: Case, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Verify(blocks):
                    case.to_verify += blocks
                case Retract():
                    case.retracts += 1
                case Admit(first):
                    assert first.token_id == 7 and case.place == "fill"
                    case.place = "decoding"
                case PrefillLocally(_, quarantined) | Abort(quarantined):
                    case.ended_local += 1
                    assert case.place == "fill" and case.ended_local == 1
                    if quarantined:
                        case.place = "quarantine"
                    else:
                        self.set_free(case)
                case ReleaseQuarantined(block_ids):
                    assert case.place == "quarantine" and set(block_ids) == set(case.blocks)
                    self.set_free(case)

    def choose(self, number: int) -> Case | None:
        """One of the few that are worth it: those under way, and the last that ended."""
        ended = [case for case in self.cases if case.place == "gone"][-1:]
        worth = [case for case in self.cases if case.place != "gone"] + ended
        return worth[number % len(worth)] if worth else None

    def lost(self, flight: Flight, error: str) -> None:
        flight.write.fail(error)
        flight.side.machine.failed(flight.posted, error)
        self.fabric.pending.remove(flight.write)
        self.flights.remove(flight)

    # ---- what may happen, in any order ----------------------------------------------------

    @precondition(lambda self: len(self.free) >= 4)
    @rule(count=st.integers(1, 4), published=st.booleans())
    def allocate(self, count: int, published: bool) -> None:
        self.allocate_blocks(count, published)

    def allocate_blocks(self, count: int, published: bool) -> None:
        blocks = [self.free.pop(0) for _ in range(count)]
        ordinals = list(range(5, 5 + count))
        grant = Claimed(
            secret=os.urandom(16),
            lease_ms=LEASE_MS,
            token_ids=pack_tokens([1]),
            sampling=SamplingParams(),
            fill=list(zip(ordinals, blocks, strict=True)),
            cached_ordinals=[0, 1, 2, 3, 4],
        )
        machine = DecodeHandoff(
            os.urandom(16), 1, grant, deadline=self.now + DEADLINE_S, grace_ms=GRACE_MS
        )
        if published:
            machine.published()
        content = {ordinal: os.urandom(BLOCK_BYTES) for ordinal in ordinals}
        self.cases.append(Case(machine, blocks, content))

    @rule(number=pick, until=st.sampled_from(STAGES))
    def all_goes_well_until(self, number: int, until: str) -> None:
        """Up to the stage `until`, so that each state of a handoff is met often."""
        if (case := self.choose(number)) is None:
            return
        for _ in range(20):
            stage, step = self.next_step(case)
            if stage == until:
                return
            step()

    def next_step(self, case: Case) -> tuple[str, Callable[[], None]]:
        side = case.side
        mine = [flight for flight in self.flights if flight.side is side]
        if side is None:
            return "claim", lambda: self.claim_for(case, attempt=1, answer_lost=False)
        if side.machine.unposted and not side.machine.error:
            return "post", lambda: self.post_for(case, count=2, backwards=False)
        if mine:
            return "land", lambda: self.land_flight(mine[0], "whole")
        if self.inbox:
            return "hear", lambda: self.hear_notice(self.inbox.pop(0))
        if case.to_verify:
            return "verify", lambda: self.verify_for(case)
        if case.machine.first is None:
            return "first", lambda: self.first_token_for(case, attempt=1)
        return "settle", lambda: self.settle_for(case, by_transfer=False)

    @rule(number=pick, answer_lost=st.booleans(), attempt=st.sampled_from([1, 1, 1, 2]))
    def claim(self, number: int, answer_lost: bool, attempt: int) -> None:
        if (case := self.choose(number)) is not None:
            self.claim_for(case, attempt, answer_lost)

    def claim_for(self, case: Case, attempt: int, answer_lost: bool) -> None:
        if case.side is not None and not case.side.machine.error:
            return  # P runs an attempt once
        claim = Claim(case.machine.handoff_id, attempt, "p", str(self.epoch))
        answer = case.machine.claim(claim, self.now)
        if answer_lost or not isinstance(answer, Claimed):
            return
        assert attempt == 1 and case.place == "fill"
        if case.side is not None:
            return
        machine = PrefillHandoff(
            claim.handoff_id, attempt, answer, claim_sent_at=self.now, margin_ms=MARGIN_MS
        )
        first_block = 4 * len([c for c in self.cases if c.side]) % len(self.p_pool)
        source = {o: (first_block + i) % len(self.p_pool) for i, o in enumerate(case.content)}
        case.side = Side(machine, source)

    @rule(number=pick, count=st.integers(1, 4), backwards=st.booleans())
    def post(self, number: int, count: int, backwards: bool) -> None:
        if (case := self.choose(number)) is not None:
            self.post_for(case, count, backwards)

    def post_for(self, case: Case, count: int, backwards: bool) -> None:
        if (side := case.side) is None:
            return
        ordinals = sorted(side.machine.unposted, reverse=backwards)[:count]
        if not ordinals or (posted := side.machine.post(ordinals, self.now)) is None:
            return
        self.compute(case, ordinals)
        sums = [xxhash.xxh3_64_intdigest(case.content[ordinal]) for ordinal in ordinals]
        notice = side.machine.landed_notice(posted, sums)
        sources = [side.source[ordinal] for ordinal in ordinals]
        write = self.p.post_write("d", sources, posted.remote_blocks, notice)
        assert isinstance(write, PendingWrite)
        self.flights.append(Flight(write, posted, side, self.now))

    def compute(self, case: Case, ordinals: Sequence[int]) -> None:
        """P's blocks are few here, so that they are filled again right before they are read."""
        assert case.side is not None
        for ordinal in ordinals:
            self.put(self.p_pool, case.side.source[ordinal], case.content[ordinal])

    @rule(number=pick, how=st.sampled_from(["whole", "twice", "torn", "early", "early", "fails"]))
    def land(self, number: int, how: str) -> None:
        if self.flights:
            self.land_flight(self.flights[number % len(self.flights)], how)

    def land_flight(self, flight: Flight, how: str) -> None:
        case = next(c for c in self.cases if c.side is flight.side)
        assert flight.side.machine.pinned
        self.compute(case, flight.posted.ordinals)
        flight.write.copy(BLOCK_BYTES // 2 if how in ("torn", "early", "fails") else None)
        if how == "twice":
            flight.write.copy()
        if how == "early":
            return  # half of it is there; the rest comes later, or never
        if how == "fails":
            self.lost(flight, "link down")
            return
        flight.write.finish()
        flight.side.machine.completed(flight.posted)
        self.fabric.pending.remove(flight.write)
        self.flights.remove(flight)
        self.inbox += [notice for _, notice in self.d.notifications()]

    @rule(number=pick, how=st.sampled_from(["once", "once", "again", "lost", "forged", "renamed"]))
    def hear(self, number: int, how: str) -> None:
        if not self.inbox:
            return
        index = number % len(self.inbox)
        notice = self.inbox[index]
        if how != "again":
            del self.inbox[index]
        if how == "forged":  # another checksum, so that it would do harm, and another secret
            notice = notice[:40] + bytes(16) + notice[56:60] + bytes(8) + notice[68:]
        if how == "renamed":  # of an earlier attempt
            notice = notice[:24] + b"\0\0\0\0" + notice[28:60] + bytes(8) + notice[68:]
        if how != "lost":
            self.hear_notice(notice, forged=how in ("forged", "renamed"))

    def hear_notice(self, notice: bytes, *, forged: bool = False) -> None:
        landed, settled = decode_landed(notice), decode_settled(notice)
        for case in self.cases:
            actions: list[Action] = []
            if landed is not None and landed.handoff_id == case.machine.handoff_id:
                actions = case.machine.landed(landed, self.now)
            if settled is not None and settled.handoff_id == case.machine.handoff_id:
                actions = case.machine.settled_notice(settled)
            assert not (forged and actions)
            self.carry_out(case, actions)

    @rule(number=pick)
    def verify(self, number: int) -> None:
        if (case := self.choose(number)) is not None:
            self.verify_for(case)

    def verify_for(self, case: Case) -> None:
        if case.to_verify:
            ordinal, block_id, checksum = case.to_verify.pop(0)
            ok = xxhash.xxh3_64_intdigest(self.get(block_id)) == checksum
            self.carry_out(case, case.machine.verified(ordinal, ok))

    @rule(number=pick, attempt=st.sampled_from([1, 1, 1, 2]))
    def first_token(self, number: int, attempt: int) -> None:
        if (case := self.choose(number)) is not None:
            self.first_token_for(case, attempt)

    def first_token_for(self, case: Case, attempt: int) -> None:
        if case.side is not None:
            first = FirstToken(case.machine.handoff_id, attempt, token_id=7 if attempt == 1 else 8)
            taken = case.machine.first
            self.carry_out(case, case.machine.first_token(first))
            case.num_emitted += case.machine.first is not taken

    @rule(number=pick, by_transfer=st.booleans())
    def settle(self, number: int, by_transfer: bool) -> None:
        if (case := self.choose(number)) is not None:
            self.settle_for(case, by_transfer)

    def settle_for(self, case: Case, by_transfer: bool) -> None:
        if case.side is None or (settled := case.side.machine.settled) is None:
            return
        assert not [flight for flight in self.flights if flight.side is case.side]
        if by_transfer:
            self.inbox.append(case.side.machine.settled_notice())
        else:
            self.carry_out(case, case.machine.settled(settled))

    @rule(number=pick)
    def retract(self, number: int) -> None:
        case = self.choose(number)
        if case is not None and case.side is not None and case.retracts:
            case.side.machine.stop("cancelled")

    @rule(number=pick, really=st.sampled_from([True, False, False]))
    def cancel(self, number: int, really: bool) -> None:
        if really and (case := self.choose(number)) is not None:
            self.carry_out(case, case.machine.cancel())

    @rule(seconds=st.sampled_from([0.02, 0.05, 0.15, 0.25, 0.7, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for flight in list(self.flights):
            if self.now - flight.posted_at > LONGEST_FLIGHT_S:
                self.lost(flight, "timed out")

    @rule()
    def tick(self) -> None:
        for case in self.cases:
            self.carry_out(case, case.machine.tick(self.now))

    @rule(really=st.sampled_from([True, False]), noticed=st.booleans(), proven=st.booleans())
    def prefill_worker_dies(self, really: bool, noticed: bool, proven: bool) -> None:
        """Not `really`: it only seems so, as when it is stopped and wakes."""
        for case in self.cases:
            if noticed or not really:
                self.carry_out(case, case.machine.peer_lost("p"))
        if not really:
            return
        for flight in list(self.flights):
            self.lost(flight, "died")
        for case in self.cases:
            if case.side is not None:
                case.side.machine.stop("died")
            if proven:
                self.carry_out(case, case.machine.peer_gone("p", str(self.epoch)))
        self.p.close()
        self.start_prefill_worker()

    @rule(number=pick)
    def an_older_process_is_gone(self, number: int) -> None:
        if (case := self.choose(number)) is not None:
            self.carry_out(case, case.machine.peer_gone("p", str(self.epoch - 1)))

    @rule(number=pick)
    def sequence_finishes(self, number: int) -> None:
        case = self.choose(number)
        if case is not None and case.place == "decoding":
            self.set_free(case)

    # ---- what must hold after each step ---------------------------------------------------

    @invariant()
    def no_write_lands_in_a_block_that_may_be_reused(self) -> None:
        for block_id in self.free:
            assert self.get(block_id) == canary(block_id), f"block {block_id} was overwritten"
        for case in self.cases:
            if case.place == "gone":
                assert case.machine.may_reuse_blocks

    @invariant()
    def decoded_kv_is_what_was_computed(self) -> None:
        for case in self.cases:
            if case.place == "decoding":
                assert [self.get(b) for b in case.blocks] == list(case.content.values())

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        held = [b for case in self.cases if case.place != "gone" for b in case.blocks]
        assert sorted(held + self.free) == list(range(NUM_BLOCKS))
        for case in self.cases:
            case.machine.check_invariants()
            assert case.num_emitted <= 1
            assert (case.machine.state is HandoffState.CLOSING) == (case.place == "quarantine")
            if case.side is not None:
                case.side.machine.check_invariants()

    def teardown(self) -> None:
        self.time_passes(1000.0)
        self.tick()
        self.tick()
        for case in self.cases:
            assert case.machine.may_reuse_blocks and case.machine.next_tick is None
            assert case.place in ("gone", "decoding")
        self.no_write_lands_in_a_block_that_may_be_reused()


TestHandoffs = Handoffs.TestCase
TestHandoffs.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
