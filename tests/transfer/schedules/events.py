"""What happens to handoffs besides their going on: time, deaths, cancels, forgers, liars."""

from typing import TYPE_CHECKING

from tandem.runtime.wire.handoff_messages import Claim, FirstToken, Settled
from tandem.transfer.handoff.landed import Landed, SettledNotice, decode_landed
from tests.transfer.schedules.blocks import TOKEN
from tests.transfer.schedules.clock import TICK_SLACK_S, pass_time
from tests.transfer.schedules.decode import GRACE_MS
from tests.transfer.schedules.parts import WATCH_S, Case, Job, Plan, Write

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.transfer.schedules.steps import Schedule

MAX_CASES = 4


def start_case(schedule: "Schedule") -> None:
    """A prompt that the decode worker hands over; mostly the same one, for its prefix."""
    world = schedule.world
    if len(world.cases) < MAX_CASES:
        prompt, num_blocks = int(schedule.chance() * 1.3), 1 + int(schedule.chance() * 4)
        lease_s, deadline_s = schedule.pick((0.6, 1.0, 1.5)), schedule.pick((0.8, 1.5))
        if world.start_case(prompt, num_blocks, lease_s, deadline_s):
            schedule.say(f"handoff {len(world.cases) - 1}: {world.cases[-1].machine.grant.fill}")


def publish(schedule: "Schedule") -> None:
    """A ticket comes to a prefill worker, for the first time or again."""
    world = schedule.world
    open_cases = world.cases
    if schedule.chance() < 0.9:
        open_cases = [case for case in world.cases if not case.machine.may_reuse_blocks]
    process = schedule.pick(world.processes)
    if not open_cases or not world.can_act(process):
        return
    case = schedule.pick(open_cases)
    if schedule.chance() < 0.9:
        case.machine.published()
    job = world.take_ticket(process, case, plan(schedule, case))
    if job is None:
        return
    tp_size = world.shape.prefill_tp
    if schedule.chance() < 0.03:
        tp_size = schedule.pick((0, 3)) if world.shape.decode_tp == 2 else 0
    schedule.say(f"{process.who} takes handoff {case.number}, run {job.run}")
    world.claim(job, tp_size)


def plan(schedule: "Schedule", case: Case) -> Plan:
    """Return the steps of computing a prompt: chunks, and groups of layers in the last one."""
    shape, num_blocks = schedule.world.shape, len(case.blocks)
    steps = []
    done = 0
    while done < num_blocks:
        done = min(num_blocks, done + 1 + int(schedule.chance() * 4))
        steps.append((done, (shape.num_layers,) * shape.num_kinds))
    kinds = list(range(shape.num_kinds)) * shape.num_layers  # layer by layer
    for layer in range(len(kinds) - 1, 0, -1):
        if schedule.chance() < 0.5:
            num_layers = tuple(kinds[:layer].count(kind) for kind in range(shape.num_kinds))
            steps.append((num_blocks, num_layers))
    return sorted(steps)


def advance(schedule: "Schedule") -> None:
    """A short while."""
    pass_time(schedule, schedule.pick((0.01, 0.02, 0.05, 0.1, 0.4)))


def leap(schedule: "Schedule") -> None:
    """Until a timer is due."""
    due = [c.machine.next_tick for c in schedule.world.cases if c.machine.next_tick is not None]
    if due:
        pass_time(schedule, max(0.0, schedule.pick(due) - schedule.world.now) + TICK_SLACK_S)


def stray_tick(schedule: "Schedule") -> None:
    """A timer that was armed for something else."""
    case = schedule.some_case()
    schedule.say(f"a stray timer of handoff {case.number}")
    schedule.world.tick(case)


def cancel(schedule: "Schedule") -> None:
    case = schedule.some_case()
    schedule.say(f"handoff {case.number} is cancelled")
    schedule.world.cancel(case)


def give_up(schedule: "Schedule") -> None:
    case = schedule.some_case()
    schedule.say(f"handoff {case.number} is given up")
    schedule.world.give_up(case)


def stop_job(schedule: "Schedule") -> None:
    process = schedule.pick(schedule.world.processes)
    for job in process.jobs[:1]:
        if job.machine is not None:
            schedule.say(f"run {job.run} stops")
            job.machine.stop("the prefill worker stops")


def post_late(schedule: "Schedule") -> None:
    """A worker gets to its next write right before the lease is over."""
    world = schedule.world
    for process in world.processes:
        for job in process.jobs:
            if job.to_post:
                last = job.to_post[0].post_before
                pass_time(schedule, max(0.0, last - world.now - schedule.pick((1e-4, 0.01, 0.05))))
                if world.can_act(process) and not job.ended and job.to_post:
                    schedule.say(f"run {job.run} posts late")
                    world.transfer(job, fails=False)
                return


def stray_layers(schedule: "Schedule") -> None:
    """Progress of the engine that was on its way when the job stopped."""
    for process in schedule.world.processes:
        for job in process.jobs:
            if job.machine is not None and job.machine.error and schedule.world.can_act(process):
                schedule.world.compute(job, backwards=False, post=True)


def freeze(schedule: "Schedule") -> None:
    process = schedule.pick(schedule.world.processes)
    seconds = schedule.pick((0.1, 0.3, 0.8, 1.5))
    schedule.say(f"{process.who} is stopped for {seconds} s")
    process.freeze(schedule.world.now + seconds, schedule.chance())


def freeze_in_post(schedule: "Schedule") -> None:
    """A worker is stopped in the middle of a post: that comes when it goes on.

    The decode worker sees that it stands still, and grants leases that outlast its deadlines.
    """
    world = schedule.world
    for process in world.processes:
        for job in process.jobs if world.can_act(process) else ():
            case = job.case
            if job.to_post and case.fear_until - GRACE_MS / 1e3 >= case.machine.deadline:
                num_writes = len(world.writes)
                world.transfer(job, fails=False)
                seconds = schedule.pick((0.3, 0.8, 1.5, 3.0))
                process.freeze(world.now + seconds, schedule.chance())
                for write in world.writes[num_writes:]:
                    write.is_half_posted = True
                    write.limit = process.frozen_until + GRACE_MS / 1e3 - WATCH_S - 1e-6
                    schedule.say(f"{process.who} is stopped in a post of run {job.run}")
                return


def kill(schedule: "Schedule") -> None:
    process = schedule.pick(schedule.world.processes)
    schedule.say(f"{process.who} dies")
    schedule.world.kill(process)


def hear_of_death(schedule: "Schedule") -> None:
    """The claim's stream breaks; or it only seems so, and the process lives on."""
    case = schedule.some_case()
    process = schedule.pick(schedule.world.processes)
    if case.claimant is not None and schedule.chance() < 0.7:
        process = case.claimant
    schedule.say(f"handoff {case.number} hears that {process.name} is lost")
    schedule.world.lose_peer(case, process.name)


def prove_death(schedule: "Schedule") -> None:
    """A dead process's connection is cut, and the handoffs hear of it: all, or one again."""
    world = schedule.world
    if not world.dead:
        return
    process = schedule.pick(world.dead)
    world.tear_down(process)
    schedule.say(f"{process.who} is proven gone")
    for case in world.cases:
        if case.claimant is process or schedule.chance() < 0.5:
            world.lose_for_good(case, process)


def finish(schedule: "Schedule") -> None:
    if schedule.world.decoding:
        schedule.world.finish(schedule.pick(schedule.world.decoding))


# ---- who does not keep to the protocol ----------------------------------------------------


def forge(schedule: "Schedule") -> None:
    """Somebody without the secret, or with that of another attempt, says something."""
    world, case = schedule.world, schedule.some_case()
    machine = case.machine
    attempt, secret = 1, machine.grant.secret
    if schedule.chance() < 0.5:
        attempt = schedule.pick((0, 2))
    else:
        secret = b"another secret.."
    handoff_id = machine.handoff_id
    schedule.say(f"forged: attempt {attempt} of handoff {case.number}, {secret!r}")
    match int(schedule.chance() * 5):
        case 0 | 1:
            ordinal, _ = schedule.pick(machine.grant.fill)
            layers = range(world.shape.num_layers)
            landed = Landed(handoff_id, attempt, secret, 0, 0, layers, ((ordinal, 0),))
            world.hear_landed(case, landed, 0, genuine=False)
        case 2:
            num_failed = schedule.pick((0, 1))
            notice = SettledNotice(handoff_id, attempt, secret, 1, num_failed)
            world.hear_settled_notice(case, notice, None)
        case 3:
            run = b"" if case.owner is None else case.owner.name
            world.hear_first(case, FirstToken(handoff_id, attempt, secret, run, TOKEN + 1))
        case 4 if attempt != 1:
            job = case.owner or Job(schedule.pick(world.processes), case, 0, [])
            num_failed = schedule.pick((0, 1))
            settled = Settled(handoff_id, attempt, 1, num_failed, run=job.name)
            world.hear_settled(case, settled, job)


def claim_wrongly(schedule: "Schedule") -> None:
    """A claim of another attempt, of another handoff, or the claimant's own once more, and late."""
    world, case = schedule.world, schedule.some_case()
    process = schedule.pick(world.processes)
    handoff_id, attempt = case.machine.handoff_id, schedule.pick((0, 1, 2))
    if attempt == 1:
        handoff_id = b"nobody's handoff"
    job = Job(process, case, 0, [])
    if case.owner is not None and schedule.chance() < 0.5:
        handoff_id, attempt, job = case.machine.handoff_id, 1, case.owner
    claim = Claim(handoff_id, attempt, *job.process.who, world.shape.prefill_tp, job.name)
    schedule.say(f"stale claim of handoff {case.number}: {claim}")
    world.hear_claim(case, claim, job)


def lie(schedule: "Schedule") -> None:
    """The claimant announces what it has no part in, or again what is there already."""
    world = schedule.world
    case = schedule.some_case()
    if case.claimant is None:
        return
    machine, num_layers = case.machine, world.shape.num_layers
    begin = int(schedule.chance() * num_layers)
    layers = range(begin, begin + 1 + int(schedule.chance() * num_layers))
    landed = [w for w in world.writes if w.job.case is case and w.fate == "landed"]
    if landed and schedule.chance() < 0.7:
        lie_again(schedule, case, schedule.pick(landed))
        return
    prefill_rank, rank = (
        int(schedule.chance() * 5),
        int(schedule.chance() * (world.shape.decode_tp + 2)),
    )
    ordinal = schedule.pick((len(case.blocks), *range(len(case.blocks))))
    if not world.verify:  # who is not verified is believed: only nonsense can be refused
        prefill_rank = world.shape.prefill_tp
    case.is_suspect = True
    secret, block = machine.grant.secret, (ordinal, schedule.draw.getrandbits(64))
    lie = Landed(machine.handoff_id, 1, secret, prefill_rank, 99, layers, (block,))
    schedule.say(f"a lie about handoff {case.number}: {lie} to rank {rank}")
    world.hear_landed(case, lie, rank)


def lie_again(schedule: "Schedule", case: Case, write: Write) -> None:
    """What has landed is announced once more, cut otherwise, or with other checksums."""
    world, posted = schedule.world, write.posted
    ranks, span = posted.ranks, posted.layers
    notice = decode_landed(write.notice)
    assert notice is not None
    layers, sums = span, [checksum for _, checksum in notice.blocks]
    if not schedule.trouble.flip and schedule.chance() < 0.7:  # else what is there is not true
        layers = range(span.start + int(schedule.chance() * len(span)), span.stop)
        sums = world.words.checksums(
            ranks.decode_rank, ranks.decode_heads, layers, posted.remote_blocks
        )
    if schedule.chance() < 0.3:
        sums[0] ^= 1
    case.is_suspect = True
    lie = Landed(
        case.machine.handoff_id,
        1,
        case.machine.grant.secret,
        ranks.prefill_rank,
        99,
        layers,
        tuple(zip(posted.ordinals, sums, strict=True)),
    )
    schedule.say(f"again of handoff {case.number}: {lie.layers} {lie.blocks}")
    world.hear_landed(case, lie, ranks.decode_rank)


# how often, against the others; a schedule leaves about half of them out
EVENTS: "tuple[tuple[Callable[[Schedule], None], int], ...]" = (
    (publish, 4), (advance, 4), (start_case, 2), (leap, 1), (post_late, 3), (finish, 3),
    (stray_tick, 1), (cancel, 1), (give_up, 1), (stop_job, 1), (stray_layers, 1), (freeze, 1),
    (freeze_in_post, 2), (kill, 1), (hear_of_death, 2), (prove_death, 2), (forge, 2),
    (claim_wrongly, 1), (lie, 3),
)  # fmt: skip
ALWAYS = frozenset((publish, advance))
