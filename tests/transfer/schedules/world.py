"""One decode worker and two prefill workers around the handoff's state machines, for schedules.

The workers are as small as they get and do what the real ones do; what happens when is the
schedule's.
"""

from tandem.engine.schedule.block_pool import BlockPool
from tandem.runtime.wire.handoff_messages import Claim, Claimed, ClaimRefused, FirstToken, Settled
from tandem.transfer.handoff.prefill import PrefillHandoff
from tests.transfer.schedules.blocks import TOKEN
from tests.transfer.schedules.decode import GRACE_MS, DecodeSide
from tests.transfer.schedules.memory import Flight, Shape, Words, rank_pairs_of
from tests.transfer.schedules.parts import Case, Job, Message, Plan, Process, Write

NUM_BLOCKS = 12  # of a prefill worker
MARGIN_MS = 100


class World(DecodeSide):
    """What there is, and what each side does; the schedule says when."""

    def __init__(self, shape: Shape, *, verify: bool, longest_s: float) -> None:
        super().__init__(shape, verify=verify)
        self.longest_s = longest_s  # the longest write that a prefill worker has measured
        self.flight_s = (MARGIN_MS + GRACE_MS) / 1e3 + longest_s - 1e-6  # what leases rest on
        self.wire: list[Message] = []
        self.stray: list[Write] = []  # failed, and maybe still on their way
        self.inbox: list[tuple[Job, int, bytes]] = []  # (from, decode rank, notice)
        self.num_runs = 0
        self.num_starts = 0
        self.dead: list[Process] = []
        self.processes = [self.start_process("p"), self.start_process("q")]

    def start_process(self, name: str) -> Process:
        self.num_starts += 1
        words = Words(self.shape, self.shape.prefill_tp, NUM_BLOCKS)
        return Process(name, self.num_starts, words, BlockPool(NUM_BLOCKS, 1, False))

    def can_act(self, process: Process) -> bool:
        return process.alive and self.now >= process.frozen_until

    def claim(self, job: Job, tp_size: int) -> None:
        """Ask for the work behind a ticket."""
        machine = job.case.machine
        claim = Claim(machine.handoff_id, 1, *job.process.who, tp_size, job.name)
        self.wire.append(Message("claim", job, claim, self.now))

    def take_ticket(self, process: Process, case: Case, plan: Plan) -> Job | None:
        """None: the process has it in hands already, and lets the second delivery be."""
        if any(job.case is case for job in process.jobs):
            return None
        self.num_runs += 1
        job = Job(process, case, self.num_runs, plan)
        process.jobs.append(job)
        return job

    def hear_answer(self, job: Job, answer: Claimed | ClaimRefused, sent_at: float) -> None:
        if isinstance(answer, ClaimRefused):
            self.end_job(job)
            return
        job.machine = machine = PrefillHandoff(
            job.case.machine.handoff_id,
            1,
            answer,
            claim_sent_at=sent_at,
            margin_ms=MARGIN_MS,
            num_layers=self.shape.num_layers,
            rank_pairs=rank_pairs_of(self.shape),
            run=job.name,
        )
        source = job.process.pool.allocate(len(answer.fill))
        if source is None:
            machine.stop("no room for the prompt")
            return
        for (ordinal, _), block_id in zip(answer.fill, source, strict=True):
            job.source[ordinal] = block_id
            job.num_layers[ordinal] = 0
            job.process.owner[block_id] = job

    def hear_nothing(self, job: Job) -> None:
        """The claim's answer never came: give up, and say so in case it was granted."""
        reason = "the claim was not answered"
        settled = Settled(job.case.machine.handoff_id, 1, 0, 0, reason, run=job.name)
        self.wire.append(Message("settled", job, settled))
        self.end_job(job)

    def compute(self, job: Job, *, backwards: bool, post: bool) -> None:
        """The next chunk of the prompt, or the next layers of its last one; post what is ready."""
        machine = job.machine
        assert machine is not None
        if job.num_steps == len(job.plan) or not job.source:
            return
        num_blocks, num_layers = job.plan[job.num_steps]
        job.num_steps += 1
        is_last = job.num_steps == len(job.plan)
        prompt = job.case.prompt
        for ordinal, block_id in job.source.items():
            layers = range(job.num_layers[ordinal], num_layers[ordinal % len(num_layers)])
            if ordinal < num_blocks and layers:
                job.process.words.compute(block_id, layers, prompt, ordinal, job.run)
                job.num_layers[ordinal] = layers.stop
        if is_last and not machine.error:
            first = FirstToken(machine.handoff_id, 1, machine.grant.secret, job.name, TOKEN)
            self.wire.append(Message("first", job, first))
            job.is_telling = True
        if not (post or is_last):
            return
        for layers, ordinals in machine.ready(num_blocks, num_layers).items():
            if backwards:
                ordinals.reverse()
            has_stopped = machine.error
            writes = machine.post(ordinals, layers, self.now, self.longest_s)
            assert not (has_stopped and writes), "posts although it has stopped"
            job.to_post += writes
        machine.check_invariants()

    def transfer(self, job: Job, *, fails: bool) -> None:
        """The transfer thread's turn: checksum, look at the lease, post."""
        machine, posted = job.machine, job.to_post.popleft()
        assert machine is not None
        ranks, words = posted.ranks, job.process.words
        local_blocks = [job.source[ordinal] for ordinal in posted.ordinals]
        must_own(job, local_blocks)
        if fails or self.now >= posted.post_before:
            machine.failed(posted, "link down" if fails else "its lease is over")
            machine.check_invariants()
            return
        sums = words.checksums(ranks.prefill_rank, ranks.prefill_heads, posted.layers, local_blocks)
        pairs = list(zip(local_blocks, posted.remote_blocks, strict=True))
        flight = Flight(words, self.words, ranks, posted.layers, pairs)
        notice = machine.landed_notice(posted)(sums)
        self.writes.append(Write(job, posted, notice, flight, self.now + self.flight_s))

    def move(self, write: Write, num_blocks: int, *, torn: bool = False) -> None:
        """Bytes of a write arrive, maybe not all of them."""
        job, posted = write.job, write.posted
        for block_id in posted.remote_blocks:
            assert self.writable.get(block_id) is job.case, (
                f"I1: a write of handoff {job.case.number} lands in block {block_id}"
            )
        if job.process.alive and write.fate == "posted":
            must_own(job, [job.source[ordinal] for ordinal in posted.ordinals])
        write.flight.copy(num_blocks, torn)

    def land(self, write: Write) -> None:
        """All of a write is there, and its notice."""
        self.move(write, len(write.posted.ordinals))
        write.fate = "landed"
        self.inbox.append((write.job, write.posted.ranks.decode_rank, write.notice))
        if not write.job.process.alive:
            self.writes.remove(write)

    def fail_write(self, write: Write) -> None:
        """It ends badly for its sender. What is on its way may still land."""
        write.fate = "failed"
        self.stray.append(write)
        if not write.job.process.alive:
            self.writes.remove(write)

    def end_stray(self, write: Write, *, lands: bool) -> None:
        """The rest of a failed write lands or is lost, and no notice tells which."""
        self.stray.remove(write)
        if lands:
            self.move(write, len(write.posted.ordinals))

    def end_write(self, write: Write, *, fails: bool) -> None:
        """Notify a prefill worker of the end of a write."""
        machine = write.job.machine
        assert machine is not None and write.fate != "posted"
        self.writes.remove(write)
        if fails or write.fate == "failed":
            machine.failed(write.posted, "link down")
        else:
            machine.completed(write.posted, write.notice)
        machine.check_invariants()

    def wind_up(self, job: Job) -> None:
        """Nothing is pinned: give the source blocks back and settle."""
        machine = job.machine
        assert machine is not None
        assert machine.error or not machine.has_unposted, "settles and has yet to write"
        assert not any(w.job is job and w.fate == "posted" for w in self.writes), (
            "I1: settles while a write can land"
        )
        settled, notice = machine.settled(), machine.settled_notice()
        self.wire.append(Message("settled", job, settled, notice=notice))
        self.end_job(job)

    def end_job(self, job: Job) -> None:
        job.ended = True
        process = job.process
        process.jobs.remove(job)
        source = list(job.source.values())
        for block_id in source:
            del process.owner[block_id]
        process.pool.free(source)
        process.pool.check_invariants(dict.fromkeys(process.owner, 1))

    def check_pins(self) -> None:
        """Whoever waits for no write of its own keeps no block for one."""
        writing = {write.job.run for write in self.writes}
        for process in self.processes:
            for job in process.jobs:
                if job.machine is not None and not job.to_post and job.run not in writing:
                    is_done = bool(job.machine.error) or job.num_steps == len(job.plan)
                    assert not (is_done and job.machine.pinned), "source blocks stay for ever"

    def retract(self, case: Case, instance: str) -> None:
        for process in self.processes:
            for job in process.jobs:
                if job.case is case and process.name == instance:
                    self.wire.append(Message("cancel", job, None))

    def kill(self, process: Process) -> None:
        """A process ends; what it has posted is still on its way, until `tear_down`."""
        process.alive = False
        process.jobs.clear()
        self.writes = [
            write
            for write in self.writes
            if write.job.process is not process
            or (write.fate == "posted" and not write.is_half_posted)
        ]
        self.dead.append(process)
        index = self.processes.index(process)
        self.processes[index] = self.start_process(process.name)

    def tear_down(self, process: Process) -> None:
        """The decode worker cuts the connections of a dead process and of its ranks."""
        process.gone = True
        self.writes = [write for write in self.writes if write.job.process is not process]
        self.stray = [write for write in self.stray if write.job.process is not process]


def must_own(job: Job, local_blocks: list[int]) -> None:
    """The source blocks of a write are still its job's."""
    for block_id in local_blocks:
        assert job.process.owner.get(block_id) is job, "a source block was reused before its write"
