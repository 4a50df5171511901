"""Time in a schedule: what is due happens in its order, or too late."""

from typing import TYPE_CHECKING

from tests.transfer.schedules.parts import Case, Process, Write

if TYPE_CHECKING:
    from tests.transfer.schedules.steps import Schedule

TICK_SLACK_S = 1e-3  # the worker's timers fire this long after `next_tick`
MAX_DUE = 200  # that can be due at once


def pass_time(schedule: "Schedule", seconds: float, lateness: float = 0.15) -> None:
    """What is in flight lands in time, or never; timers fire when they are due, or later."""
    world = schedule.world
    until = world.now + seconds
    is_late = schedule.chance() < lateness
    for _ in range(MAX_DUE):
        due: float = until
        what: Case | Write | Process | None = None
        for write in world.writes:
            if write.fate == "posted" and write.limit < due:
                due, what = write.limit, write
        for write in world.stray:
            if write.limit < due:
                due, what = write.limit, write
        for case in world.cases:
            next_tick = case.machine.next_tick
            if next_tick is not None and next_tick + TICK_SLACK_S < due and not is_late:
                due, what = next_tick + TICK_SLACK_S, case
        for process in world.processes:
            if world.now < process.seen_at < due:
                due, what = process.seen_at, process
        world.now = max(world.now, due)
        if what is None:
            break
        if isinstance(what, Process):
            for case in world.cases:
                if case.claimant is what and case.place == "quarantine":
                    world.watch(case)
        elif isinstance(what, Case):
            schedule.say(f"timer of handoff {what.number}")
            world.tick(what)
        elif what in world.stray:
            schedule.say(f"the last of a failed write of run {what.job.run}")
            world.end_stray(what, lands=schedule.chance() < 0.6)
        elif schedule.chance() < 0.6:
            schedule.say(f"a write of run {what.job.run} lands at the last moment")
            world.land(what)
        else:
            world.fail_write(what)
    else:
        raise AssertionError("a timer that fires changes nothing, and fires again")
    if not is_late:
        world.check_deadlines(TICK_SLACK_S)
