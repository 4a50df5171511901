"""What a handoff costs on this machine, figure by figure, each against its target.

python -m tandem.bench.handoff --json handoff.json
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.markup import escape

from tandem.bench.handoff.plan import QUICK, Plan
from tandem.bench.handoff.served_figures import measure_served, served_figures
from tandem.bench.handoff.wire_figures import block_figures, measure_wire, wire_figures
from tandem.bench.report.figures import Figure, document, table, utc_now
from tandem.runtime.errors import TandemError

HOW = {
    "(a)": "from the prompt's last KV (the timeline's `computed`) until all of it is proven at the "
    "decode worker (`verified`), less the bare library's time for the bytes that can't have left "
    "before; the second goes on to `first_step` and takes one later decode step off. `computed` is "
    "the prefill worker's clock set by the claim's answer, so one message's way counts as handover",
    "(b)": "two processes, the same prepared descriptors and blocks; a write is over when its "
    "sender knows it has arrived; the bare library polls without a pause or with pauses of 20 us, "
    "whichever is faster",
    "(c)": "8k tokens in blocks of 16; preparing is all that a write takes the transfer thread "
    "less the library's own post",
    "(d)": "two processes whose agents poll as while a handoff is under way; CPU by the processes' "
    "own accounts",
    "(e)": "the exposed part by the timeline; the work by the rate of one core's checksums",
    "(f)": "`computed` to `verified`, of two topologies in turns: stream_layers on and off; both "
    "send earlier chunks while later ones are computed",
    "model": "random weights, 4 layers with 1 KV head of 64 in float32: 2 KiB of KV per token",
}


async def measure(plan: Plan, run_dir: Path, sections: Sequence[str], say: Console) -> list[Figure]:
    """Every figure of the sections asked for; `run_dir` is an existing folder."""
    figures: list[Figure] = []
    say.print("two processes: bandwidth, round trips, resting")
    wires = await measure_wire(plan)
    figures += wire_figures(plan, wires)
    if "blocks" in sections:
        say.print("block pools: descriptors, preparation")
        figures += await block_figures(plan)
    if "served" in sections:
        say.print("served processes: handover, verification, streaming")
        figures += served_figures(await measure_served(plan, run_dir), wires)
    return sorted(figures, key=lambda figure: figure.label[:3])


def main(
    rounds: Annotated[int | None, typer.Option(min=1, help="rounds, of which medians are")] = None,
    quick: Annotated[bool, typer.Option(help="a few samples of everything: no figures")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="sections beside the wire: blocks, served")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="write everything as JSON")] = None,
) -> None:
    """Measure handoffs on this machine: minutes, in which it should do nothing else."""
    plan = QUICK if quick else Plan()
    if rounds is not None:
        plan = replace(plan, rounds=rounds)
    sections = ("blocks", "served") if only is None else only
    if unknown := set(sections) - {"wire", "blocks", "served"}:
        raise typer.BadParameter(f"no such section: {', '.join(sorted(unknown))}")
    say = Console(stderr=True, highlight=False)
    started_at = utc_now()
    with tempfile.TemporaryDirectory(prefix="tandem-handoff-") as folder:
        try:
            figures = uvloop.run(measure(plan, Path(folder), sections, say))
        except TandemError as error:
            say.print(f"[red]error:[/] {escape(error.message)}", soft_wrap=True)
            raise typer.Exit(1) from error
    out = Console(highlight=False, markup=False)
    out.print(table(figures), soft_wrap=True)
    for part, meaning in HOW.items():
        out.print(f"{part}: {meaning}", soft_wrap=True)
    if json is not None:
        whole = document(
            command=["python", "-m", "tandem.bench.handoff", *sys.argv[1:]],
            settings=msgspec.to_builtins(asdict(plan), str_keys=True),
            started_at=started_at,
            figures=figures,
            how=HOW,
        )
        json.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")


if __name__ == "__main__":
    typer.run(main)
