"""Random schedules of handoffs: what happens next, and how badly. One seed is one schedule.

A schedule draws the ranks, the layers, which kinds of trouble there are and how much, then steps
until the handoffs are over; at last time runs out, and every handoff must have ended.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tandem.runtime.wire.handoff_messages import Claim, Claimed, ClaimRefused, FirstToken, Settled
from tandem.transfer.handoff.landed import decode_landed, decode_settled
from tests.transfer.schedules.clock import TICK_SLACK_S, pass_time
from tests.transfer.schedules.events import ALWAYS, EVENTS, MAX_CASES, finish, publish, start_case
from tests.transfer.schedules.memory import Shape
from tests.transfer.schedules.parts import Case, Job, Message, Write
from tests.transfer.schedules.world import World

T = TypeVar("T")
# (prefill ranks, decode ranks, KV heads)
ALONE = ((1, 1, 1),) * 5
WIDTHS = (*ALONE, (2, 1, 2), (1, 2, 2), (4, 2, 4), (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 2, 2))
STEPS = (40, 60, 90, 120)
MAX_ENDS = 100  # timers until all is over; a worker that is stopped goes on some time


@dataclass(frozen=True, slots=True)
class Trouble:
    """How likely it is that what goes on goes wrong: of messages, writes and bits."""

    loss: float
    repeat: float
    tear: float
    failure: float
    flip: float
    haste: float  # that the next thing to happen is one that goes on anyway


class Schedule:
    """One seed's way through a world. `log` gets a line per step."""

    def __init__(self, draw: random.Random, log: list[str] | None = None) -> None:
        self.draw = draw
        self.chance = draw.random
        self.log = log
        shape = Shape(*self.pick(WIDTHS), self.pick((1, 2, 3, 4)), self.pick((1, 1, 2)))
        verify = self.chance() < 0.7
        self.world = World(shape, verify=verify, longest_s=self.pick((0.0, 0.0, 0.15)))
        self.trouble = Trouble(
            loss=self.pick((0.0, 0.05, 0.25)),
            repeat=self.pick((0.0, 0.1, 0.3)),
            tear=self.pick((0.0, 0.2, 0.4)),
            failure=self.pick((0.0, 0.02, 0.15)),
            flip=self.pick((0.0, 0.0, 0.2)) if verify else 0.0,
            haste=self.pick((0.75, 0.9, 0.97)),
        )
        bits = draw.getrandbits(len(EVENTS))
        self.menu = [
            event
            for index, (event, weight) in enumerate(EVENTS)
            if bits >> index & 1 or event in ALWAYS
            for _ in range(weight)
        ]
        if log is not None:
            self.say(f"{shape}, verify {verify}, {self.trouble}")

    def say(self, line: str) -> None:
        if self.log is not None:
            self.log.append(f"{self.world.now:8.3f} {line}")

    def pick(self, among: Sequence[T]) -> T:
        return among[int(self.chance() * len(among))]

    def some_case(self) -> Case:
        return self.pick(self.world.cases)

    def run(self) -> None:
        """The whole schedule; raises AssertionError, or whatever a machine raises."""
        start_case(self)
        publish(self)
        for _ in range(self.pick(STEPS)):
            self.step()
            if not self.world.num_open:
                if len(self.world.cases) == MAX_CASES:
                    break
                if self.chance() < 0.5:
                    finish(self)
                start_case(self)
                publish(self)
        self.end()

    def step(self) -> None:
        if self.chance() < self.trouble.haste and self.go_on():
            return
        self.pick(self.menu)(self)

    def end(self) -> None:
        """Time runs out: every handoff has ended and every block is accounted for (I4, I6)."""
        world = self.world
        for _ in range(MAX_ENDS):
            due = [c.machine.next_tick for c in world.cases if c.machine.next_tick is not None]
            if not due:
                break
            pass_time(self, max(0.0, min(due) + TICK_SLACK_S - world.now) + TICK_SLACK_S, 0.0)
        for case in world.cases:
            assert case.place in ("decoding", "gone"), f"I4: handoff {case.number} never ended"
            assert case.machine.may_reuse_blocks and case.machine.next_tick is None
        for decoding in list(world.decoding):
            world.finish(decoding)
        assert world.pool.num_available == world.pool.num_blocks, "I6: blocks were lost"
        assert not world.writable
        world.check_pins()

    # ---- what goes on by itself ---------------------------------------------------------------

    def go_on(self) -> bool:
        """One of the things that are under way; False when nothing is."""
        world = self.world
        jobs = [
            job
            for process in world.processes
            if process.frozen_until <= world.now
            for job in process.jobs
            if job.can_go_on
        ]
        counts = [
            len(them)
            for them in (world.wire, world.inbox, world.writes, jobs, world.checks, world.stray)
        ]
        if not any(counts):
            return False
        index = int(self.chance() * sum(counts))
        kind = 0
        while index >= counts[kind]:
            index -= counts[kind]
            kind += 1
        match kind:
            case 0:
                self.deliver(index)
            case 1:
                self.hear_notice(index)
            case 2:
                self.go_on_writing(index)
            case 3:
                self.go_on_with_job(jobs[index])
            case 4:
                self.go_on_checking(index)
            case 5:
                self.go_on_with_stray(index)
        return True

    def deliver(self, index: int) -> None:
        world, trouble = self.world, self.trouble
        message = world.wire[index]
        job = message.job
        process = job.process
        is_for_p = message.kind in ("answer", "cancel")
        if is_for_p and process.alive and not world.can_act(process):
            return
        is_lost = self.chance() < trouble.loss
        is_again = message.kind not in ("claim", "answer") and self.chance() < trouble.repeat
        if not is_again or is_lost:
            del world.wire[index]
        if is_lost:
            self.say(f"{message.kind} of handoff {job.case.number} is lost")
            self.lose(message)
            return
        if self.log is not None:
            self.say(f"{message.kind} of handoff {job.case.number}, run {job.run}: {message.body}")
        case = job.case
        match message.body:
            case Claim() as claim:
                answer = world.hear_claim(case, claim, job)
                world.wire.append(Message("answer", job, answer, message.sent_at))
            case Claimed() | ClaimRefused() as answer:
                if process.alive and not job.ended and job.machine is None:
                    world.hear_answer(job, answer, message.sent_at)
            case FirstToken() as first:
                job.is_telling = False
                world.hear_first(case, first)
            case Settled() as settled:
                world.hear_settled(case, settled, job)
            case None:
                if job.machine is not None and not job.ended:
                    job.machine.stop("the decode worker retracted it")

    def lose(self, message: Message) -> None:
        """Whoever called hears that it got no answer."""
        world, job = self.world, message.job
        process = job.process
        if not process.alive:
            return
        match message.kind:
            case "claim" | "answer" if not job.ended and job.machine is None:
                if message.kind == "claim" and self.chance() < 0.3:
                    world.wire.append(message)  # it only seems lost, and comes late
                if self.chance() < 0.5:
                    if self.chance() < 0.5:  # it takes a while until it is sure
                        pass_time(self, self.pick((0.1, 0.3)))
                    if not process.alive or job.ended:
                        return
                    world.claim(job, world.shape.prefill_tp)
                else:
                    world.hear_nothing(job)
            case "first" if job.machine is not None and not job.ended:
                job.is_telling = False
                job.machine.stop("the first token was not delivered")
            case "settled" if message.notice:
                world.inbox.append((job, 0, message.notice))

    def hear_notice(self, index: int) -> None:
        world = self.world
        job, rank, data = world.inbox[index]
        case = job.case
        if self.chance() >= self.trouble.repeat:
            del world.inbox[index]
        if self.chance() < self.trouble.loss:
            self.say(f"a notice of handoff {case.number} is lost")
            return
        landed = decode_landed(data)
        if landed is not None:
            self.say(f"notice of handoff {case.number}: {landed.layers}")
            world.hear_landed(case, landed, rank)
            return
        settled = decode_settled(data)
        assert settled is not None
        self.say(f"settled notice of handoff {case.number}: {settled.num_failed} failed")
        world.hear_settled_notice(case, settled, job)

    def go_on_writing(self, index: int) -> None:
        world, trouble = self.world, self.trouble
        write = world.writes[index]
        if write.fate != "posted":
            if world.can_act(write.job.process):
                fails = self.chance() < trouble.failure
                self.say(f"{name(write)} ends for its sender, {'badly' if fails else 'well'}")
                world.end_write(write, fails=fails)
            return
        self.decide(write)

    def decide(self, write: Write) -> None:
        """A write lands, in part or as a whole, or fails."""
        world, trouble = self.world, self.trouble
        luck = self.chance()
        if luck < trouble.tear:
            num_blocks = int(self.chance() * (len(write.posted.ordinals) + 1))
            self.say(f"{name(write)} lands in part")
            world.move(write, num_blocks, torn=luck < trouble.tear / 2)
        elif self.chance() < trouble.failure:
            self.say(f"{name(write)} fails")
            world.fail_write(write)
        else:
            self.say(f"{name(write)} lands")
            world.land(write)
            if trouble.flip and self.chance() < trouble.flip:
                self.flip(write)

    def go_on_with_stray(self, index: int) -> None:
        """A part of what has failed for its sender lands, or the last of it."""
        world = self.world
        write = world.stray[index]
        self.say(f"{name(write)}, which has failed, lands in part")
        if self.chance() < 0.5:
            world.move(write, int(self.chance() * (len(write.posted.ordinals) + 1)))
        else:
            world.end_stray(write, lands=self.chance() < 0.5)

    def flip(self, write: Write) -> None:
        """A faulty link: a bit of what landed is another."""
        world, posted = self.world, write.posted
        block_id = self.pick(posted.remote_blocks)
        rank = posted.ranks.decode_rank
        width = 2 * world.words.num_heads
        layer, head = self.pick(list(posted.layers)), self.pick(list(posted.ranks.decode_heads))
        position = layer * width + head
        word = world.words.block(rank, block_id)[position]
        world.words.put(rank, block_id, position, [word ^ 1 << int(self.chance() * 40)])
        write.job.case.is_suspect = True
        self.say(f"a bit flips in block {block_id}")

    def go_on_with_job(self, job: Job) -> None:
        world = self.world
        assert job.machine is not None
        if not job.machine.pinned and not job.is_telling:
            self.say(f"run {job.run} settles: {job.machine.error or 'all is written'}")
            world.wind_up(job)
        elif job.to_post and self.chance() < 0.6:
            self.say(f"run {job.run} posts {job.to_post[0].ordinals} {job.to_post[0].layers}")
            world.transfer(job, fails=self.chance() < self.trouble.failure)
        else:
            self.say(f"run {job.run} computes {job.num_steps + 1} of {len(job.plan)}")
            backwards, post = self.chance() < 0.2, self.chance() < 0.8
            world.compute(job, backwards=backwards, post=post)

    def go_on_checking(self, index: int) -> None:
        world = self.world
        check = world.checks[index]
        if check.ok is None:
            world.verify_now(check)
            if self.chance() < 0.2:
                return
        if self.chance() >= self.trouble.repeat / 4:
            del world.checks[index]
        self.say(f"ordinal {check.ordinal} of handoff {check.case.number} verified: {check.ok}")
        world.hear_verified(check)


def name(write: Write) -> str:
    return f"write {write.posted.sequence_number} of run {write.job.run}"
