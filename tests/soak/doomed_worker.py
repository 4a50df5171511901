"""The `tandem` command with hooks for tests: `doomed_worker.py HOOKS ROLE ARGUMENTS`."""

import importlib
import sys
from pathlib import Path

import msgspec

from tandem.launch.cli.main import main
from tests.soak import points, sabotage, wiring


class Hooks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is done to the worker. `folder` is where it meets its test."""

    folder: str
    standby: bool = False  # all is loaded, and the worker starts when the test says so
    port: int = 0  # it listens here, and ...
    advertised: str = ""  # ... says that it is there
    links: str = ""  # a file: advertised address |-> where it dials instead
    flip_probability: float = 0.0
    is_blind: bool = False  # every landed block counts as proven
    seed: int = 0


def run() -> None:
    hooks = msgspec.json.decode(sys.argv[1], type=Hooks)
    del sys.argv[1]
    role, folder = sys.argv[1], Path(hooks.folder)
    roles = ("decode", "prefill") if role == "worker" else (role,)
    for each in roles:
        importlib.import_module(f"tandem.{each}.worker")
    points.install(role, folder)
    if hooks.port:
        wiring.listen_behind_proxy(hooks.port, hooks.advertised)
    if hooks.links:
        wiring.dial_through(Path(hooks.links))
    if "decode" in roles:
        notes = sabotage.Notes(folder)
        sabotage.note_handoffs(notes)
        if hooks.flip_probability:
            sabotage.flip_bits(hooks.flip_probability, hooks.seed, notes)
        if hooks.is_blind:
            sabotage.blind()
    if hooks.standby:
        points.stand_by(folder)
    main()


if __name__ == "__main__":
    run()
