"""The course of a program: options in, figures out as a table and as a JSON document."""

import asyncio
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import uvloop

from tandem.bench.report.console import print_figures, say
from tandem.bench.report.document import document, utc_now, write_document
from tandem.bench.report.figures import Figure
from tandem.runtime.errors import TandemError


class HasOutput(Protocol):
    """A dataclass of options with `--output`."""

    @property
    def output(self) -> Path | None: ...


Figures = Iterable[Figure]
Measure = Callable[[Path], Figures | Coroutine[Any, Any, Figures]]


def run_program(module: str, options: HasOutput, how: Mapping[str, str], measure: Measure) -> int:
    """Run `python -m module` and return its exit status: 1 when a figure failed.

    `measure` gets a folder that is removed at the end. `how` defines the figures.
    """
    started_at = utc_now()
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        try:
            found = measure(Path(folder))
            figures = list(uvloop.run(found) if isinstance(found, Coroutine) else found)
        except TandemError as error:
            say(f"error: {error.message}")
            return 1
    print_figures(figures, how)
    if options.output is not None:
        whole = document(
            command=["python", "-m", module, *sys.argv[1:]],
            settings=dataclasses.asdict(options),  # type: ignore[call-overload]
            started_at=started_at,
            how=how,
            figures=figures,
        )
        write_document(options.output, whole)
    return int(any(figure.failure for figure in figures))


async def in_rounds(
    num_rounds: int,
    run_dir: Path,
    measure_round: Callable[[Path], Coroutine[Any, Any, dict[str, float]]],
) -> list[dict[str, float]]:
    """Return the values of each round; a round gets a folder of its own."""
    rounds = []
    for index in range(num_rounds):
        say(f"round {index + 1} of {num_rounds}")
        folder = run_dir / f"round-{index + 1}"
        await asyncio.to_thread(folder.mkdir)
        rounds.append(await measure_round(folder))
    return rounds
