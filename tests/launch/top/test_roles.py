"""The role keys of `tandem top`."""

import asyncio

import pytest

from tandem.launch.top.roles import RoleChanges, Worker
from tandem.runtime.errors import UnavailableError
from tandem.runtime.wire.cluster_messages import WorkerRole

DECODE = Worker("abcdefgh1", "decode")


class Keyboard:
    """Role keys in front of a worker that takes its time, or refuses."""

    def __init__(self) -> None:
        self.changed: list[tuple[str, WorkerRole]] = []
        self.may_answer, self.ended = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None
        self.roles = RoleChanges(self._change, self.ended.set)

    async def _change(self, instance_id: str, role: WorkerRole) -> None:
        self.changed.append((instance_id, role))
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error

    async def answered(self) -> str:
        self.may_answer.set()
        async with asyncio.timeout(60):
            await self.ended.wait()
        self.ended.clear()
        return self.roles.note(0.0)


async def test_two_keys_change_a_role_and_u_changes_it_back() -> None:
    keyboard = Keyboard()
    press = keyboard.roles.press
    assert press("r", DECODE) and "p prefill" in keyboard.roles.note(0.0)
    assert press("p", None)
    await asyncio.sleep(0)
    assert "for " in keyboard.roles.note(1.0)
    assert press("r", DECODE) and press("u", DECODE), "one at a time"
    assert await keyboard.answered() == "worker abcdefgh has the role prefill; u gives back decode"
    press("u", None)
    assert await keyboard.answered() == "worker abcdefgh has the role decode"
    assert keyboard.changed == [("abcdefgh1", "prefill"), ("abcdefgh1", "decode")]
    press("u", None)
    assert keyboard.roles.note(0.0) == "no role was changed here"


async def test_another_key_leaves_the_role_and_q_still_ends() -> None:
    keyboard = Keyboard()
    press = keyboard.roles.press
    press("r", DECODE)
    assert press("x", DECODE) and keyboard.roles.note(0.0) == ""
    press("r", DECODE)
    assert not press("q", DECODE)
    assert not press("p", DECODE) and not press("down", DECODE)
    press("r", None)
    assert "select a worker" in keyboard.roles.note(0.0)
    assert keyboard.changed == []


@pytest.mark.parametrize("error", [UnavailableError("it drains"), ValueError("no answer")])
async def test_a_refusal_is_on_the_screen_and_nothing_is_to_undo(error: Exception) -> None:
    keyboard = Keyboard()
    keyboard.error = error
    keyboard.roles.press("r", DECODE)
    keyboard.roles.press("b", DECODE)
    assert str(error) in await keyboard.answered()
    keyboard.roles.press("u", None)
    assert keyboard.roles.note(0.0) == "no role was changed here"
