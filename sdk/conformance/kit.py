"""The conformance kit: checks of an engine against the contract of `LLMEngine`.

In a test: `await run_conformance(MyEngine, argv=["--max-tokens", "16"])`. In a shell:
`tandem conformance my_backend.engine:MyEngine --max-tokens 16`. As one pytest test per check:
`tandem.sdk.conformance.plugin`.
"""

import argparse
import asyncio
import inspect
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from tandem.runtime.errors import ConfigError, TandemError
from tandem.sdk.conformance.checks import CHECKS
from tandem.sdk.conformance.errors import ConformanceError
from tandem.sdk.conformance.lifecycle import (
    Leftovers,
    cleanup_after_partial_start,
    cleanup_without_start,
)
from tandem.sdk.conformance.streams import ConformanceSettings, NotApplicable, Subject
from tandem.sdk.engine.llm_engine import LLMEngine
from tandem.sdk.engine.worker_config import WorkerConfig
from tandem.sdk.engine_worker.run import load_engine
from tandem.sdk.worker.models import ModelInput

Made = LLMEngine | tuple[LLMEngine, WorkerConfig]
EngineFactory = type[LLMEngine] | Callable[[], Made | Awaitable[Made]]

CHECK_NAMES = (
    "cleanup_without_start",
    "cleanup_after_partial_start",
    *(check.name for check in CHECKS),
    "tasks",
    "threads",
)


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check: passed, or a `failure`, or the reason why it was `not_run`."""

    name: str
    duration_s: float = 0.0
    failure: ConformanceError | None = None
    not_run: str | None = None


@dataclass
class ConformanceReport:
    """The outcomes of all checks, in order."""

    engine: str
    results: list[CheckResult] = field(default_factory=list)

    @property
    def failures(self) -> list[ConformanceError]:
        return [each.failure for each in self.results if each.failure is not None]

    @property
    def num_passed(self) -> int:
        return sum(each.failure is None and each.not_run is None for each in self.results)

    def result(self, name: str) -> CheckResult:
        """Return the outcome of the check `name`, one of CHECK_NAMES."""
        return next(each for each in self.results if each.name == name)

    def text(self) -> str:
        """Return the report for a reader: one line per check, and each failure in full."""
        lines = [f"{self.engine}: {self.num_passed} of {len(self.results)} checks passed"]
        for each in self.results:
            if each.failure is not None:
                explained = each.failure.explain().replace("\n", "\n    ")
                lines.append(f"  FAILED   {each.name}\n    {explained}")
            elif each.not_run is not None:
                lines.append(f"  not run  {each.name}: {each.not_run}")
            else:
                lines.append(f"  passed   {each.name} ({each.duration_s:.2f} s)")
        return "\n".join(lines)

    def json(self) -> str:
        """Return the report for a program."""
        results = [
            {
                "name": each.name,
                "outcome": "failed" if each.failure else "not_run" if each.not_run else "passed",
                "duration_s": round(each.duration_s, 3),
                "failure": each.failure.name if each.failure else None,
                "message": each.failure.message if each.failure else each.not_run,
                "rule": each.failure.rule if each.failure else None,
            }
            for each in self.results
        ]
        return json.dumps({"engine": self.engine, "results": results}, indent=2)


async def run_conformance(
    factory: EngineFactory, argv: Sequence[str] = (), settings: ConformanceSettings | None = None
) -> ConformanceReport:
    """Make all checks. Raise the first failure, a ConformanceError, with the others as notes.

    `examine` returns the report in every case.
    """
    report = await examine(factory, argv, settings)
    if report.failures:
        first, *others = report.failures
        for other in others:
            first.add_note(f"and {other.explain()}")
        raise first
    return report


async def examine(
    factory: EngineFactory, argv: Sequence[str] = (), settings: ConformanceSettings | None = None
) -> ConformanceReport:
    """Make all checks and return their report.

    `factory` is an engine class, made by its `from_args(argv)`, or a function that returns a new
    engine, or an engine and its WorkerConfig. Three engines are made; one is started in full.
    """
    settings = settings or ConformanceSettings()
    _check_skips(settings)
    report = ConformanceReport(_name(factory))
    leftovers = Leftovers()
    for name, check in (
        ("cleanup_without_start", cleanup_without_start),
        ("cleanup_after_partial_start", cleanup_after_partial_start),
    ):
        engine, _ = await _make(factory, argv)
        await _record(report, name, settings, partial(check, engine, settings))
    engine, config = await _make(factory, argv)
    subject = Subject(engine, settings)
    if config is not None:
        subject.mode = config.disaggregation_mode
        subject.is_text = config.model_input is ModelInput.Text
    await _examine_started(report, subject)
    await _record(report, "tasks", settings, leftovers.check_tasks)
    await _record(report, "threads", settings, leftovers.check_threads)
    return report


async def _examine_started(report: ConformanceReport, subject: Subject) -> None:
    stopped: str | None = None
    for check in CHECKS:
        if stopped is not None and not check.at_end:
            report.results.append(CheckResult(check.name, not_run=stopped))
            continue
        result = await _record(report, check.name, subject.settings, partial(check.run, subject))
        await subject.close_streams()
        if result.failure is not None and check.fatal:
            stopped = f"{check.name} failed"


async def _record(
    report: ConformanceReport,
    name: str,
    settings: ConformanceSettings,
    run: Callable[[], Awaitable[None]],
) -> CheckResult:
    begun = time.perf_counter()
    failure, not_run = None, None
    if name in settings.skip:
        not_run = "left out"
    else:
        try:
            await run()
        except ConformanceError as error:
            failure = error
        except NotApplicable as reason:
            not_run = str(reason)
    result = CheckResult(name, time.perf_counter() - begun, failure, not_run)
    report.results.append(result)
    return result


async def _make(
    factory: EngineFactory, argv: Sequence[str]
) -> tuple[LLMEngine, WorkerConfig | None]:
    made: Made | Awaitable[Made]
    if isinstance(factory, type) and issubclass(factory, LLMEngine):
        made = factory.from_args(list(argv))
    else:
        made = cast(Callable[[], Made | Awaitable[Made]], factory)()
    if inspect.isawaitable(made):
        made = await made
    return made if isinstance(made, tuple) else (made, None)


def _name(factory: EngineFactory) -> str:
    return getattr(factory, "__qualname__", type(factory).__name__)


def _check_skips(settings: ConformanceSettings) -> None:
    if unknown := settings.skip - set(CHECK_NAMES):
        raise ConfigError(
            f"no check is named {', '.join(sorted(unknown))}; there are {', '.join(CHECK_NAMES)}",
            param="skip",
        )


# ---- the command line -------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run `[options] module:Engine [arguments of the engine]`; return 0 if every check passed."""
    options = _parser().parse_args(argv)
    settings = ConformanceSettings(
        start_timeout_s=options.start_timeout_s,
        generate_timeout_s=options.generate_timeout_s,
        cancel_timeout_s=options.cancel_timeout_s,
        max_tokens=options.max_tokens,
        prefill_result=options.prefill_result,
        skip=frozenset(options.skip),
    )
    try:
        report = asyncio.run(examine(load_engine(options.engine), options.arguments, settings))
    except TandemError as error:
        print(f"tandem conformance: {error.message}", file=sys.stderr)
        return 2
    print(report.json() if options.json else report.text())
    return 1 if report.failures else 0


def _parser() -> argparse.ArgumentParser:
    usual = ConformanceSettings()
    parser = argparse.ArgumentParser(
        prog="tandem conformance", description="Checks an engine against the contract of LLMEngine."
    )
    parser.add_argument("engine", help="module:Class, a subclass of LLMEngine")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="arguments for the engine's from_args"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--skip", action="append", default=[], choices=CHECK_NAMES, help="leave a check out"
    )
    parser.add_argument("--max-tokens", type=int, default=usual.max_tokens)
    for name in ("start_timeout_s", "generate_timeout_s", "cancel_timeout_s"):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=float, default=getattr(usual, name))
    parser.add_argument(
        "--prefill-result", type=json.loads, help="JSON that requests to a decode engine carry"
    )
    return parser
