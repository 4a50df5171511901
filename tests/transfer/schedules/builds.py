"""Builds of the handoff's state machines with guards taken out."""

import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tandem.transfer.handoff.decode as decode_module
import tandem.transfer.handoff.prefill as prefill_module
from tests.transfer.schedules.parts import Build

Side = Literal["decode", "prefill"]
_MODULES = {"decode": decode_module, "prefill": prefill_module}


@dataclass(frozen=True, slots=True)
class Cut:
    """One replacement in one machine's source, where `old` occurs exactly `count` times."""

    side: Side
    old: str
    new: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Guard:
    """What is taken out together: more than one cut where the guards cover for each other."""

    name: str
    cuts: tuple[Cut, ...]


def source(side: Side) -> str:
    """The real machine's source."""
    path = _MODULES[side].__file__
    assert path is not None
    return Path(path).read_text()


def build_without(guard: Guard) -> Build:
    """The machines with the guard taken out."""
    names: dict[str, Any] = {}
    sides: tuple[Side, ...] = ("prefill", "decode")
    for side in sides:
        text = source(side)
        for cut in guard.cuts:
            if cut.side == side:
                assert text.count(cut.old) == cut.count, (
                    f"{guard.name}: {cut.old!r} is {text.count(cut.old)} times in {side}"
                )
                text = text.replace(cut.old, cut.new)
        module = types.ModuleType(f"{side} without {guard.name}")
        exec(compile(text, module.__name__, "exec"), module.__dict__)
        names |= module.__dict__ if side == "decode" else {"Prefill": module.PrefillHandoff}
    return Build(names["DecodeHandoff"], names["Prefill"], names["HandoffState"])
