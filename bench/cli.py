"""The command line of `tandem bench`: load against an OpenAI-compatible server, measured."""

import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.markup import escape

from tandem.bench.client.http import ExchangeError
from tandem.bench.load.metrics import DEFINITIONS
from tandem.bench.load.options import USUAL_URL, BenchOptions
from tandem.bench.load.report import print_definitions, print_summary, result_json, side_of
from tandem.bench.load.runs import ONLY_RUN, Document, Pictured, Side, document_of, read_document
from tandem.bench.load.session import Session
from tandem.bench.load.sides import run_comparison
from tandem.bench.load.sweep import run_sweep
from tandem.bench.picture.command import write_report
from tandem.bench.picture.drawing import require_matplotlib, write_plot
from tandem.bench.picture.page import write_page
from tandem.bench.report.document import document, utc_now, write_document
from tandem.bench.report.options import parse
from tandem.runtime.clock import set_pace
from tandem.runtime.errors import ConfigError, TandemError
from tandem.runtime.local.local_clusters import running_clusters

EXIT_ALL_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `tandem bench` and return its exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        words = sys.argv[1:] if arguments is None else arguments
        if words[:1] == ["report"]:
            return write_report(words[1:])
        options = parse(BenchOptions, "tandem.bench.cli", words, prog="tandem bench")
        set_pace(options.pace)
        if not options.url:
            options = dataclasses.replace(options, url=_url_in(options.config) or _served_here())
        return uvloop.run(_run(Session(options), Console(highlight=False)))
    except (TandemError, ExchangeError, OSError) as error:
        Console(stderr=True, highlight=False).print(
            f"[red]error:[/] {escape(str(error))}", soft_wrap=True
        )
        return EXIT_USAGE


def _url_in(file: Path | None) -> str:
    """Return the frontend's address in a config file; empty where there is none."""
    if file is None:
        return ""
    # it imports every room's config, which only a config file needs
    from tandem.bench.load.live_config import frontend_url

    return frontend_url(file)


def _served_here() -> str:
    """Return the address of `tandem serve` on this machine, or the usual one."""
    served = [cluster.http_url for cluster in running_clusters() if cluster.http_url]
    if len(served) > 1:
        raise ConfigError(f"several clusters run here, choose one: --url {' or '.join(served)}")
    return served[0] if served else USUAL_URL


async def _run(session: Session, console: Console) -> int:
    started_at = utc_now()
    options = session.options
    # what cannot be drawn or read is refused before anything is measured
    if options.plot is not None or options.report is not None:
        require_matplotlib("--plot" if options.report is None else "--report")
    against = None if options.against is None else read_document(options.against)
    with session.interrupt.installed():
        if options.is_comparison:
            results, sides = await run_comparison(session, console)
        elif options.is_sweep:
            results, sides = await run_sweep(session, console)
        else:
            results, sides = await _run_once(session, console)
    _print_reuse_warning(session)
    print_definitions(console)
    settings = {
        **dataclasses.asdict(options),
        "seed": session.seed,
        "workload": session.workload.describe(),
        "plan": msgspec.to_builtins(session.plan),
    }
    whole = document(
        command=sys.argv, settings=settings, started_at=started_at, how=DEFINITIONS, **results
    )
    if options.output is not None:
        write_document(options.output, whole)
    if options.plot is not None:
        write_plot(options.plot, sides)
    if options.report is not None and any(side.rounds for side in sides):
        write_page(options.report, _pictured(document_of(whole), sides, options, against))
    if session.interrupt.is_set:
        return EXIT_INTERRUPTED
    some_succeeded = any(run.summary.num_succeeded for side in sides for run in side.rounds)
    return 0 if some_succeeded else EXIT_ALL_FAILED


def _pictured(
    measured: Document, sides: list[Side], options: BenchOptions, against: Document | None
) -> Pictured:
    """Return the sides of a page: those just measured have their requests."""
    finished = [side for side in sides if side.rounds]
    if against is None or options.against is None:
        return Pictured([measured], finished)
    earlier = list(against.sides(options.against.stem))
    return Pictured([against, measured], [*earlier, *finished])


async def _run_once(session: Session, console: Console) -> tuple[dict[str, Any], list[Side]]:
    client = session.client(session.options.url)
    try:
        body = await session.body(client)
        await session.warm_up(client, body)
        run = await session.measure(client, body, label="bench")
    finally:
        client.close()
    title = f"{body.model} at {session.options.url}"
    print_summary(console, title, run, session.slos)
    results = result_json(run, with_records=session.options.records)
    sides = [side_of(ONLY_RUN, [run], session.plan, session.options.workers)]
    return {"title": title, **results}, sides


def _print_reuse_warning(session: Session) -> None:
    options = session.options
    verbatim = options.prompts is not None and not options.cache_salt
    if options.seed is not None or verbatim:
        why = "the prompt file is sent as it is" if verbatim else f"--seed {options.seed} is fixed"
        Console(stderr=True, highlight=False).print(
            f"[yellow]note:[/] {why}: running this again sends the same prompts, which the prefix "
            "cache of the server may still hold",
            soft_wrap=True,
        )


if __name__ == "__main__":
    sys.exit(main())
