"""One measured run from options to figures: server, seeds, warm-up and interrupt."""

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from tandem.bench.client.openai import OpenAIClient, PreparedRequest
from tandem.bench.client.wire import BodyBuilder
from tandem.bench.load.load import LoadPlan, LoadResult, LoadRun
from tandem.bench.load.metrics import Summary, parse_slos, summarize
from tandem.bench.load.options import BenchOptions
from tandem.bench.load.trace import TraceWorkload
from tandem.bench.load.workload import Seeds, Workload
from tandem.runtime.errors import ServiceError
from tandem.runtime.process.progress import ProgressBar

MAX_WARMUP_CONCURRENCY = 8
REFRESH_S = 0.25  # of the progress


@dataclass(frozen=True, slots=True)
class Run:
    """One run and its figures."""

    result: LoadResult
    summary: Summary


class Interrupt:
    """Ctrl-C once stops the run in progress and the runs to come; twice ends the process."""

    def __init__(self) -> None:
        self.is_set = False
        self._run: LoadRun | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    @contextlib.contextmanager
    def stops(self, run: LoadRun) -> Iterator[None]:
        """Let the interrupt stop `run` while the body runs."""
        self._run = run
        if self.is_set:
            run.stop()
        try:
            yield
        finally:
            self._run = None

    def _on_signal(self) -> None:
        if self.is_set:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        self.is_set = True
        if self._run is not None:
            self._run.stop()


class Session:
    """The load that the options describe, ready to be run against one or more servers."""

    def __init__(self, options: BenchOptions) -> None:
        self.options = options
        self.workload: Workload = options.workload()
        self.plan = options.plan()
        self.slos = parse_slos(options.goodput)
        self.seed = secrets.randbits(32) if options.seed is None else options.seed
        self.interrupt = Interrupt()
        self._bar = ProgressBar("bench", total=options.num_runs)
        self._num_measured = 0
        self._headers = options.headers()

    @property
    def total(self) -> int | None:
        """The number of requests of a run, where that is known."""
        num_entries = (
            len(self.workload.entries) if isinstance(self.workload, TraceWorkload) else None
        )
        counts = [n for n in (self.plan.num_requests, num_entries) if n is not None]
        return min(counts, default=None)

    def client(self, url: str) -> OpenAIClient:
        return OpenAIClient(
            url, self.options.endpoint, headers=self._headers, timeout_s=self.options.timeout
        )

    async def body(self, client: OpenAIClient) -> BodyBuilder:
        """Return bodies for the model asked for, or the server's first.

        Raises ServiceError without a model, ConfigError for a trace beyond its context.
        """
        name = self.options.model
        trace = self.workload if isinstance(self.workload, TraceWorkload) else None
        served = await client.served_models() if name is None or trace is not None else []
        if name is None:
            if not served:
                raise ServiceError(f"{client.pool.host} serves no model yet; name one: --model")
            name = served[0].id
        context = next((model.max_model_len for model in served if model.id == name), None)
        if trace is not None and context is not None:
            trace.require_fit(context, self.total)
        return self.options.body(name)

    async def warm_up(self, client: OpenAIClient, body: BodyBuilder, *, label: str = "") -> None:
        """Send requests of the same shape that enter no figure, with prompts of their own."""
        if self.options.warmup:
            requests = self._requests(Seeds(self.seed, f"{self.seed}/warm-up/{label}"), body)
            plan = LoadPlan(
                concurrency=min(self.options.warmup, MAX_WARMUP_CONCURRENCY),
                num_requests=self.options.warmup,
            )
            run = LoadRun(client, requests, plan)
            with self.interrupt.stops(run):
                await run.run()

    async def measure(
        self,
        client: OpenAIClient,
        body: BodyBuilder,
        *,
        label: str,
        round_index: int = 0,
        plan: LoadPlan | None = None,
    ) -> Run:
        """Measure one run; those of a round share lengths and arrivals, no two labels a prompt.

        `plan` is the point of a sweep; by default it is the session's own.
        """
        plan = plan or self.plan
        seeds = Seeds(self.seed + round_index, f"{self.seed}/{round_index}/{label}")
        run = LoadRun(client, self._requests(seeds, body), plan, seeds.shape)
        with self.interrupt.stops(run), self._bar:
            showing = asyncio.create_task(self._show(run, plan, label))
            try:
                result = await run.run()
            finally:
                showing.cancel()
        self._num_measured += 1
        return Run(result, summarize(result.records, self.slos))

    async def _show(self, run: LoadRun, plan: LoadPlan, label: str) -> None:
        """Show the progress of a run until cancelled."""
        of_total = f"/{self.total}" if self.total else ""
        while True:
            done = run.num_finished / self.total if self.total else 0.0
            passed = run.elapsed_s / plan.duration_s if plan.duration_s else 0.0
            failed = f", {run.num_failed} failed" if run.num_failed else ""
            counts = f"{run.num_finished}{of_total} done, {run.num_in_flight} in flight{failed}"
            share = min(max(done, passed), 1.0)
            self._bar.update(self._num_measured + share, f"{label}: {counts}")
            await asyncio.sleep(REFRESH_S)

    def _requests(self, seeds: Seeds, body: BodyBuilder) -> Iterator[PreparedRequest]:
        for spec in self.workload.prompts(seeds):
            yield PreparedRequest(
                body.encode(spec.prompt, spec.num_output_tokens, spec.cache_salt),
                spec.num_output_tokens if body.ignore_eos else None,
                spec.offset_s,
            )
