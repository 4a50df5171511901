"""The order of callers whose grammars are compiled, and what is refused at once."""

import asyncio

import pytest

from tandem.grammar.lane import Lane
from tandem.grammar.refusals import MAX_COSTLY, MAX_REMEMBERED, REMEMBERED_S, Refusals
from tandem.runtime.errors import InvalidRequestError, OverloadedError
from tandem.runtime.wire.messages import Grammar


async def take(lane: Lane, caller: str, order: list[str]) -> None:
    async with lane.turn(caller):
        await asyncio.sleep(0)
        order.append(caller)


async def test_callers_take_turns() -> None:
    lane, order = Lane(16, 16), list[str]()
    await asyncio.gather(*(take(lane, each, order) for each in "aaaabbc"))
    assert "".join(order) == "aabcaba"


async def test_no_more_than_the_bounds_wait() -> None:
    lane, order = Lane(4, 2), list[str]()
    async with lane.turn("a"):
        waiting = [asyncio.create_task(take(lane, each, order)) for each in "aabc"]
        await asyncio.sleep(0)
        for caller in "ad":  # this one has two, and there are four
            with pytest.raises(OverloadedError) as caught:
                await take(lane, caller, order)
            assert caught.value.retry_after_s >= 1
    await asyncio.gather(*waiting)
    assert "".join(order) == "abca"


@pytest.mark.parametrize("has_turn", [False, True])
async def test_a_turn_of_one_who_left_goes_on(has_turn: bool) -> None:
    lane, order = Lane(4, 2), list[str]()
    async with lane.turn("a"):
        leaving, staying = (asyncio.create_task(take(lane, each, order)) for each in "bc")
        await asyncio.sleep(0)
        if not has_turn:
            leaving.cancel()
            await asyncio.sleep(0)
    if has_turn:
        leaving.cancel()
    async with asyncio.timeout(60):
        await staying
        await take(lane, "d", order)
    assert leaving.cancelled() and "".join(order) == "cd"


def grammar(i: int) -> Grammar:
    return Grammar("regex", f"{i}")


def fault(text: str) -> InvalidRequestError:
    return InvalidRequestError(text, param="grammar")


def test_what_was_refused_is_refused_at_once_for_a_while() -> None:
    now = [0.0]
    refusals = Refusals(lambda: now[0])
    for i in range(MAX_REMEMBERED + 1):
        refusals.note(grammar(i), "", fault(f"fault {i}"), is_costly=True)
    refusals.check(grammar(0), "")  # the oldest is forgotten
    with pytest.raises(InvalidRequestError, match="fault 1"):
        refusals.check(grammar(1), "anyone")
    now[0] = REMEMBERED_S
    refusals.check(grammar(1), "")


def test_a_caller_whose_grammars_keep_breaking_their_trial_waits_alone() -> None:
    now = [0.0]
    refusals = Refusals(lambda: now[0])
    for i in range(MAX_COSTLY):
        refusals.check(grammar(99), "eve")
        now[0] += 1
        refusals.note(grammar(i), "eve", fault("too long"), is_costly=True)
        refusals.note(grammar(10 + i), "bob", fault("a typing error"), is_costly=False)
        refusals.note(
            grammar(20 + i), "", fault("too long, of a caller without a name"), is_costly=True
        )
    with pytest.raises(OverloadedError) as caught:
        refusals.check(grammar(99), "eve")
    for caller in ("bob", ""):
        refusals.check(grammar(99), caller)
    now[0] += caught.value.retry_after_s
    refusals.check(grammar(99), "eve")


def test_names_of_callers_are_bounded() -> None:
    refusals = Refusals(lambda: 0.0)
    for i in range(2 * MAX_REMEMBERED):
        refusals.note(grammar(0), f"key {i}", fault("too long"), is_costly=True)
    assert len(refusals._costly) == MAX_REMEMBERED
