"""A world of workers and handoffs in which things happen as a test says."""

from collections.abc import Sequence

from tandem.runtime.messages import Claim, FirstToken, Settled
from tandem.transfer.handoff.landed import decode_landed
from tests.transfer.schedules.blocks import NUM_BLOCKS
from tests.transfer.schedules.memory import Memory, Shape, WordMemory
from tests.transfer.schedules.parts import Case, Job, Message, Write
from tests.transfer.schedules.world import World

LEASE_S, DEADLINE_S = 1.0, 1.5


class Stage(World):
    """Two layers, one rank on each side. Every step checks all invariants."""

    def __init__(self, memory: Memory | None = None) -> None:
        memory = memory or WordMemory()
        super().__init__(Shape(1, 1, 2), memory, verify=True, longest_s=0.0)

    def handoff(self, prompt: int = 0, num_blocks: int = 4) -> Case:
        assert self.start_case(prompt, num_blocks, LEASE_S, DEADLINE_S)
        self.cases[-1].machine.published()
        return self.cases[-1]

    def run_of(self, case: Case, worker: int = 0, steps: Sequence[int] = (2, 4)) -> Job:
        """A prefill worker takes the ticket and claims; the decode worker's answer is handled."""
        job = self.take_ticket(self.processes[worker], case, [(step, (2,)) for step in steps])
        assert job is not None
        self.claim(job, 1)
        message = self.sent("claim", job)
        assert isinstance(message.body, Claim)
        answer = self.hear_claim(case, message.body, job)
        self.hear_answer(job, answer, message.sent_at)
        return job

    def sent(self, kind: str, job: Job) -> Message:
        """Take a message from the wire."""
        [message] = [m for m in self.wire if m.kind == kind and m.job is job]
        self.wire.remove(message)
        return message

    def post(self, job: Job, *, fails: bool = False) -> list[Write]:
        """Compute the next chunk and post it."""
        before = list(self.writes)
        self.compute(job, backwards=False, post=True)
        while job.to_post:
            self.transfer(job, fails=fails)
        return [write for write in self.writes if write not in before]

    def deliver(self, write: Write) -> None:
        """A write lands, the decode worker verifies it, and the prefill worker sees its end."""
        self.land(write)
        self.hear_notices()
        self.end_write(write, fails=False)

    def hear_notices(self) -> None:
        while self.inbox:
            job, rank, data = self.inbox.pop(0)
            notice = decode_landed(data)
            assert notice is not None
            self.hear_landed(job.case, notice, rank)
        self.verify_all()

    def verify_all(self) -> None:
        while self.checks:
            check = self.checks.pop(0)
            self.verify_now(check)
            self.hear_verified(check)

    def hear_token(self, job: Job) -> None:
        body = self.sent("first", job).body
        assert isinstance(body, FirstToken)
        self.hear_first(job.case, body)

    def settle(self, job: Job) -> Settled:
        self.wind_up(job)
        body = self.sent("settled", job).body
        assert isinstance(body, Settled)
        self.hear_settled(job.case, body, job)
        return body

    def prefill(self, job: Job) -> None:
        """All goes well."""
        for _ in job.plan[job.num_steps :]:
            for write in self.post(job):
                self.deliver(write)
        self.hear_token(job)
        self.settle(job)

    def must_balance(self) -> None:
        for decoding in list(self.decoding):
            self.finish(decoding)
        assert self.pool.num_available == NUM_BLOCKS
        for process in self.processes:
            assert process.pool.num_held == 0
