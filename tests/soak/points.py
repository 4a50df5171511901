"""Named points of a handoff at which a worker under test dies, stops or waits.

A worker started by `doomed_worker.py` looks into its folder whenever it comes to a point: a file
`armed` there says at which point to do what, once. It announces that it did by a file `fired`.
"""

import asyncio
import functools
import importlib
import inspect
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Action = Literal["kill", "stop", "hold"]
HOLD_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Point:
    """A call of a method of the product: right before it, or right after it."""

    module: str
    owner: str
    method: str
    after: bool = False


POINTS: dict[str, dict[str, Point]] = {
    "prefill": {
        "before claim": Point("tandem.transfer.handoff.sender", "HandoffSender", "run"),
        "after claim": Point("tandem.transfer.handoff.sender", "HandoffSender", "_connect"),
        # its lease was looked at, and the write is not yet out
        "inside a post": Point("tandem.transfer.nixl", "NixlTransport", "post"),
        "mid-write": Point("tandem.transfer.handoff.writer", "BlockWriter", "_write", after=True),
        "before the first token": Point(
            "tandem.prefill.compute", "PromptComputation", "_send_first_token"
        ),
        "before settled": Point("tandem.transfer.handoff.claimant", "Claimant", "settle"),
    },
    "decode": {
        "before publish": Point("tandem.decode.handoffs", "RemotePrefill", "_publish_ticket"),
        "before claim": Point(
            "tandem.decode.handoffs", "RemotePrefill", "_publish_ticket", after=True
        ),
        "after claim": Point(
            "tandem.transfer.handoff.receiver", "HandoffReceiver", "claim", after=True
        ),
        "mid-write": Point(
            "tandem.decode.handoffs", "RemotePrefills", "on_notification", after=True
        ),
        "before settled": Point("tandem.transfer.handoff.server", "HandoffServer", "_on_settled"),
    },
}
CHANGE_POINTS = {
    "before taking a role up": Point("tandem.worker.roles", "Roles", "_take_up"),
    "after taking a role up": Point("tandem.worker.roles", "Roles", "_take_up", after=True),
    "before laying a role down": Point("tandem.worker.roles", "Roles", "_lay_down"),
    "after laying a role down": Point("tandem.worker.roles", "Roles", "_lay_down", after=True),
}
POINTS["worker"] = CHANGE_POINTS | {
    f"{role}: {name}": point
    for role in ("prefill", "decode")
    for name, point in POINTS[role].items()
}


class Trap:
    """The test's side of a worker's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def arm(self, point: str, action: Action) -> None:
        """The next time the worker comes to `point`, it does `action`."""
        for name in ("fired", "release"):
            (self.folder / name).unlink(missing_ok=True)
        _write(self.folder / "armed", f"{action} {point}")

    def disarm(self) -> None:
        """Take back what has not happened, let go what waits."""
        (self.folder / "armed").unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Let a worker that holds go on."""
        (self.folder / "release").touch()

    async def fired(self, timeout_s: float = 60.0) -> float:
        """Waits until it has happened; when that was (time.monotonic())."""
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return float((self.folder / "fired").read_text())
                except FileNotFoundError:
                    await asyncio.sleep(HOLD_POLL_S)

    def go(self) -> None:
        """A worker on standby may join the cluster."""
        (self.folder / "go").touch()

    @property
    def has_fired(self) -> bool:
        return (self.folder / "fired").exists()


def stand_by(folder: Path) -> None:
    """Blocks until the test says `go`."""
    while not (folder / "go").exists():
        time.sleep(HOLD_POLL_S)


def install(role: str, folder: Path) -> None:
    """Wraps the methods of the role's points in this process."""
    by_method: dict[tuple[str, str, str], dict[bool, str]] = {}
    for name, point in POINTS[role].items():
        where = (point.module, point.owner, point.method)
        by_method.setdefault(where, {})[point.after] = name
    for (module, owner, method), names in by_method.items():
        cls = getattr(importlib.import_module(module), owner)
        original = getattr(cls, method)
        setattr(cls, method, _wrapped(original, names.get(False), names.get(True), folder))


def _wrapped(
    original: Callable[..., Any], before: str | None, after: str | None, folder: Path
) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def wrapper(*args: Any, **options: Any) -> Any:
            await _come_to(before, folder)
            result = await original(*args, **options)
            await _come_to(after, folder)
            return result

        return wrapper

    @functools.wraps(original)
    def plain_wrapper(*args: Any, **options: Any) -> Any:
        _spring(before, folder)
        result = original(*args, **options)
        if after is not None and asyncio.get_running_loop():
            # one turn later: what the method sent has left this process
            asyncio.get_running_loop().call_soon(_spring, after, folder)
        return result

    return plain_wrapper


async def _come_to(point: str | None, folder: Path) -> None:
    if _spring(point, folder) == "hold":
        while not (folder / "release").exists():
            await asyncio.sleep(HOLD_POLL_S)


def _spring(point: str | None, folder: Path) -> str | None:
    """Does what was asked for at `point`; a hold is the caller's to do."""
    armed = folder / "armed"
    try:
        action, _, where = armed.read_text().partition(" ")
    except FileNotFoundError:
        return None
    if where != point:
        return None
    armed.unlink(missing_ok=True)
    _write(folder / "fired", str(time.monotonic()))
    if action in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
    return action


def _write(path: Path, text: str) -> None:
    """In one piece, for who looks at the same moment."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)
