"""The decode worker of a schedule: carries out what its machines ask for, and checks I3 and I4."""

from tandem.runtime.wire.handoff_messages import Claim, Claimed, ClaimRefused, FirstToken, Settled
from tandem.runtime.wire.messages import SamplingParams
from tandem.transfer.handoff.actions import (
    Abort,
    Action,
    Admit,
    PrefillLocally,
    ReleaseQuarantined,
    Retract,
    Verify,
)
from tandem.transfer.handoff.causes import CloseCause
from tandem.transfer.handoff.decode import DecodeHandoff, HandoffState
from tandem.transfer.handoff.landed import Landed, SettledNotice
from tests.transfer.schedules.blocks import BlocksSide
from tests.transfer.schedules.memory import Shape, layout_of, rank_pairs_of
from tests.transfer.schedules.parts import Case, Check, Job, Process

GRACE_MS = 200
ACCUSATIONS = (CloseCause.VIOLATION, CloseCause.CORRUPT, CloseCause.INCOMPLETE)
SAMPLING = SamplingParams()


class DecodeSide(BlocksSide):
    """One decode worker: what it hears, and what its machines ask it for."""

    def __init__(self, shape: Shape, *, verify: bool) -> None:
        super().__init__(shape)
        self.verify = verify
        self.checks: list[Check] = []

    def start_case(self, prompt: int, num_blocks: int, lease_s: float, deadline_s: float) -> bool:
        """Reserve blocks for a prompt; False when there are too few."""
        hashes = [bytes((prompt, ordinal)) for ordinal in range(num_blocks - 1)]
        blocks = self.pool.match_prefix(hashes)
        num_cached = len(blocks)
        fresh = self.pool.allocate(num_blocks - num_cached)
        if fresh is None:
            self.pool.free(blocks)
            return False
        blocks = blocks + fresh
        number = len(self.cases)
        grant = Claimed(
            secret=b"secret%010d" % number,
            lease_ms=round(lease_s * 1e3),
            token_ids=b"",
            sampling=SAMPLING,
            fill=list(enumerate(blocks))[num_cached:],
            cached_ordinals=list(range(num_cached)),
        )
        machine = DecodeHandoff(
            b"handof%010d" % number,
            1,
            grant,
            deadline=self.now + deadline_s,
            grace_ms=GRACE_MS,
            layout=layout_of(self.shape),
            verify=self.verify,
        )
        case = Case(number, machine, prompt, blocks, num_cached)
        self.cases.append(case)
        self.num_open += 1
        for block_id in fresh:
            assert block_id not in self.writable, "I6: a block was given out twice"
            self.writable[block_id] = case
        self.check_pool()
        return True

    def hear_claim(self, case: Case, claim: Claim, job: Job) -> Claimed | ClaimRefused:
        machine = case.machine
        answer = machine.claim(claim, self.now)
        machine.check_invariants()
        if isinstance(answer, ClaimRefused):
            return answer
        wide, narrow = (
            max(claim.tp_size, self.shape.decode_tp),
            min(claim.tp_size, self.shape.decode_tp),
        )
        assert claim.attempt == machine.attempt, "I3: a claim of another attempt was granted"
        assert claim.handoff_id == machine.handoff_id, "I3: another handoff's claim was granted"
        assert self.now < machine.deadline, "I4: granted after the deadline"
        assert narrow and wide % narrow == 0, "granted to ranks that don't fit"
        assert case.owner in (None, job), "I3: a handoff has two owners"
        assert not case.has_settled, "I3: granted again after it had settled"
        assert case.place == "fill" and machine.is_live
        case.owner = job
        case.is_suspect |= claim.tp_size != self.shape.prefill_tp
        case.fear_until = self.now + (answer.lease_ms + GRACE_MS) / 1e3
        case.runs.append(job.run)
        return answer

    def hear_landed(self, case: Case, notice: Landed, rank: int, genuine: bool = True) -> None:
        machine, state = case.machine, case.machine.state
        actions = machine.landed(notice, self.now, rank)
        assert genuine or (not actions and machine.state is state), "I3: a forged notice counts"
        is_late = bool(case.fear_until) and self.now > case.fear_until + 1e-6
        assert not (is_late and actions), "I3: a notice counts after lease and grace"
        self.act(case, actions)

    def hear_settled(self, case: Case, settled: Settled, job: Job) -> None:
        machine, before = case.machine, case.machine.state
        if settled.attempt == machine.attempt and case.owner is job:
            self.note_failed(case, settled.num_failed)
        actions = machine.settled(settled, self.now)
        if settled.attempt != machine.attempt:
            assert not actions and machine.state is before, "I3: another attempt has settled this"
            return
        if case.owner is not job:
            assert not actions and machine.state is before, "I3: who was not granted has settled"
            return
        self.act(case, actions)
        went_well = not settled.num_failed and not settled.error
        if went_well and not case.is_suspect and self.now <= case.fear_until:
            was_live = before in (HandoffState.CLAIMED, HandoffState.WRITING)
            assert machine.is_live or machine.complete or not was_live, "all went well, and it ends"
        if not case.has_settled:
            self.note_settled(case)
            is_done = machine.all_landed and went_well
            assert is_done or not machine.is_live, "I4: waits for what was settled not to come"

    def hear_settled_notice(self, case: Case, notice: SettledNotice, job: Job | None) -> None:
        machine, before = case.machine, case.machine.state
        if job is not None:
            self.note_failed(case, notice.num_failed)
        actions = machine.settled_notice(notice)
        if job is None:
            assert not actions and machine.state is before, "I3: a forged notice counts"
            return
        self.act(case, actions)
        if job.machine is not None and not job.machine.error:
            was_live = before in (HandoffState.CLAIMED, HandoffState.WRITING)
            assert machine.is_live or not was_live, "all went well, and it ends"
        if not case.has_settled:
            self.note_settled(case)
            assert job.machine is not None
            assert not (job.machine.error and machine.is_live), "I4: waits for what failed"

    def note_failed(self, case: Case, num_failed: int) -> None:
        """Fear what has failed for its sender: that it has settled is no proof."""
        case.is_loose |= bool(num_failed)

    def note_settled(self, case: Case) -> None:
        case.has_settled = True
        is_quiet = case.place != "quarantine"
        assert is_quiet or case.is_loose, "I4: quarantined although all is settled"

    def hear_first(self, case: Case, first: FirstToken) -> None:
        machine, before = case.machine, case.machine.first
        actions = machine.first_token(first)
        if machine.first is not before:
            case.num_emitted += 1
            assert first.attempt == machine.attempt, "I3: another attempt's token counts"
            assert case.num_emitted == 1, "the first token was emitted twice"
            assert case.place == "fill", "a first token for a handoff that is over"
        self.act(case, actions)

    def verify_now(self, check: Check) -> None:
        """Compute the checksum of the decode worker's block as it is now."""
        span = check.span
        for ranks in rank_pairs_of(self.shape):
            if (ranks.prefill_rank, ranks.decode_rank) == (span.prefill_rank, span.decode_rank):
                assert span.layers.stop <= self.shape.num_layers, "verifies what does not exist"
                [found] = self.words.checksums(
                    span.decode_rank, ranks.decode_heads, span.layers, [check.block_id]
                )
                check.ok = found == check.announced
                return
        raise AssertionError("verifies what does not exist")

    def hear_verified(self, check: Check) -> None:
        assert check.ok is not None
        self.act(check.case, check.case.machine.verified(check.span, check.ordinal, check.ok))

    def lose_peer(self, case: Case, name: str) -> None:
        actions = case.machine.peer_lost(name)
        is_claimant = case.claimant is not None and case.claimant.name == name
        assert is_claimant or not actions, "another worker's end counts"
        assert not (case.has_settled and actions), "it had settled, and may leave"
        self.act(case, actions)
        may_wait = case.place != "fill" or case.has_settled
        assert may_wait or not is_claimant, "I4: waits for a lost peer"

    def lose_for_good(self, case: Case, process: Process) -> None:
        assert process.gone
        actions = case.machine.peer_gone(*process.who)
        assert case.claimant is process or not actions, "another process's end counts"
        self.act(case, actions)
        is_over = case.place in ("decoding", "gone")
        assert is_over or case.claimant is not process, "I4: waits for a dead peer"

    def tick(self, case: Case) -> None:
        machine = case.machine
        self.watch(case)
        actions = machine.tick(self.now)
        is_early = self.now < machine.deadline or case.place == "quarantine"
        if is_early and (case.claimant is None or self.now <= case.fear_until - 1e-6):
            assert not actions, "a timer ends a handoff before its time"
        self.act(case, actions)
        has_ended = machine.state in (
            HandoffState.ADMITTED,
            HandoffState.CLOSING,
            HandoffState.CLOSED,
        )
        assert has_ended or self.now < machine.deadline, "I4: not ended by its deadline"

    def watch(self, case: Case) -> None:
        """Look whether the claimant's process stands still."""
        claimant = case.claimant
        if claimant is not None and claimant.alive and self.now < claimant.frozen_until:
            case.machine.claimant_stopped(self.now)
            case.fear_until = max(case.fear_until, self.now + GRACE_MS / 1e3)

    def cancel(self, case: Case) -> None:
        case.is_cancelled = case.place == "fill"
        self.act(case, case.machine.cancel())
        assert case.place != "fill", "I4: waits for what nobody wants"

    def give_up(self, case: Case) -> None:
        self.act(case, case.machine.fail(CloseCause.UNCLAIMED, "no prefill worker took it"))
        assert case.place != "fill", "I4: waits although it was given up"

    def check_deadlines(self, slack_s: float) -> None:
        """After timers that were on time."""
        for case in self.cases:
            machine = case.machine
            if self.now > machine.deadline + 2 * slack_s:
                assert machine.state in (
                    HandoffState.ADMITTED,
                    HandoffState.CLOSING,
                    HandoffState.CLOSED,
                ), f"I4: handoff {case.number} has not ended by its deadline"

    def act(self, case: Case, actions: list[Action]) -> None:
        """Carry out what the machine of `case` asks for."""
        machine = case.machine
        for action in actions:
            match action:
                case Verify(span, blocks):
                    fill = dict(machine.grant.fill)
                    for ordinal, block_id, announced in blocks:
                        assert fill[ordinal] == block_id, "I5: verifies another block"
                        self.checks.append(Check(case, span, ordinal, block_id, announced))
                case Admit(first):
                    self.admit(case, first)
                case PrefillLocally(cause, _, quarantined):
                    assert not case.is_cancelled, "goes on with what nobody wants"
                    assert not quarantined or Retract in map(type, actions)
                    self.must_be_fair(case, cause)
                    self.give_back(case, quarantined)
                    self.prefill_locally(case)
                case Abort(quarantined):
                    assert case.is_cancelled, "a request was lost"
                    assert not quarantined or Retract in map(type, actions)
                    self.give_back(case, quarantined)
                case Retract(instance, message):
                    assert (message.handoff_id, message.attempt) == (machine.handoff_id, 1)
                    self.retract(case, instance)
                case ReleaseQuarantined(block_ids):
                    assert case.place == "quarantine" and list(block_ids) == case.fill
                    self.must_be_quiet(case)
                    self.pool.release_quarantined(block_ids)
                    self.leave(case)
        machine.check_invariants()
        is_closing = machine.state is HandoffState.CLOSING
        assert is_closing == (case.place == "quarantine"), "I6: the machine and the pool disagree"
        assert machine.may_reuse_blocks == (case.place in ("decoding", "gone"))

    def must_be_fair(self, case: Case, cause: CloseCause) -> None:
        """A worker that keeps to the protocol is not accused of breaking it."""
        if not case.is_suspect and self.now <= case.fear_until:
            assert cause not in ACCUSATIONS, f"an honest worker is accused: {cause}"

    def retract(self, case: Case, instance: str) -> None:
        """Tell the claimant to stop."""
        raise NotImplementedError
