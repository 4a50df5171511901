"""A planner beside every fixed split, or every fixed number, of workers, under a virtual clock.

python -m tandem.launch.simulation.planned --load swinging --phase 60
python -m tandem.launch.simulation.planned --load tides --max-workers 8
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.bench.load.metrics import meets
from tandem.bench.report.console import say
from tandem.bench.report.options import option, parse
from tandem.config.planner import PlannerConfig
from tandem.launch.planner.planner import Change, Planner
from tandem.launch.simulation.arrivals import Arrivals, of_trace
from tandem.launch.simulation.cluster import Setup, VirtualCluster
from tandem.launch.simulation.emulated import both_targets, disagg_of
from tandem.launch.simulation.layout import Layout, layouts_of
from tandem.launch.simulation.load import PlannedRequest
from tandem.launch.simulation.worker import HandoffTime, WorkerFigures
from tandem.prefill.config import PrefillConfig
from tandem.router.config import RouterConfig
from tandem.runtime.errors import ConfigError, TandemError
from tandem.runtime.wire.cluster_messages import StepCosts

MODULE = "tandem.launch.simulation.planned"
EXIT_FAILED = 1

# An 8B model on a GPU, about: 4,000 tokens of prompt take 0.18 s, 200 answers 16 ms a step.
WORKER = WorkerFigures(
    StepCosts((0.0065, 2e-5, 4e-8), (0.001, 4.5e-5, 5e-10), 0.05, 2048, 512),
    num_blocks=8000,
    block_size=64,
    max_num_seqs=256,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """Alike requests: the bounds of their lengths, and their rate for one worker."""

    prompt_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]
    rate: float


PROMPTS = Kind((3072, 5120), (32, 96), 30 / 8)
ANSWERS = Kind((64, 192), (768, 1280), 72 / 8)
# kind, its share of the rate, and its phases: every one, even or odd ones
LOADS: dict[str, tuple[tuple[Kind, float, tuple[int, ...]], ...]] = {
    "swinging": ((PROMPTS, 1.0, (0,)), (ANSWERS, 1.0, (1,))),
    "prompts": ((PROMPTS, 1.0, (0, 1)),),
    "answers": ((ANSWERS, 1.0, (0, 1)),),
    "tides": (
        (PROMPTS, 0.5, (0,)),
        (ANSWERS, 0.5, (0,)),
        (PROMPTS, 0.1, (1,)),
        (ANSWERS, 0.1, (1,)),
    ),
    "mix": ((PROMPTS, 0.5, (0, 1)), (ANSWERS, 0.5, (0, 1))),
}


class PlannedCluster(VirtualCluster):
    """Workers that begin in the roles of a layout; `moves` has each change and its second.

    One that starts serves after `start_s`. `worker_s` sums the seconds of all, starts included.
    """

    def __init__(
        self, layout: Layout, setup: Setup, config: PlannerConfig, start_s: float = 30.0
    ) -> None:
        super().__init__(layout, setup)
        self.planner = Planner(config, setup.figures.block_size)
        self.moves: list[tuple[float, Change]] = []
        self.worker_s = 0.0
        self._gone: set[str] = set()
        self._start_s = start_s
        self._decides_at_s = config.interval_s
        self._under_way: Change | None = None

    @property
    def _num_coming(self) -> int:
        return self._under_way.count if self._under_way is not None else 0

    def _report(self) -> None:
        super()._report()
        now_s = self._clock.now_s
        serving = [each for each in self.workers if each.name not in self._gone]
        for worker in serving:
            self.planner.reported(worker.report(), now_s)
        if now_s < self._decides_at_s:
            return
        interval_s = self.planner.config.interval_s
        self._decides_at_s = now_s + interval_s
        self.worker_s += interval_s * (len(serving) + self._num_coming)
        self.planner.keep(worker.name for worker in serving)
        num_tokens = self._handoffs.num_ticket_tokens
        change = self.planner.decide(num_tokens, now_s, self._under_way).change
        if change is None:
            return
        self.moves.append((now_s, change))
        if change.kind == "start":
            self._under_way = change
            self._clock.after(self._start_s, lambda: self._started(change))
            return
        worker = next(each for each in serving if each.name == change.instance_id)
        if change.kind == "stop":
            self._gone.add(worker.name)
            self.remove(worker)
            self.planner.counts.ended(now_s)
        else:
            self.change_role(worker, change.role)

    def _started(self, change: Change) -> None:
        self._under_way = None
        for _ in range(change.count):
            self.add(change.role)
        self.planner.counts.ended(self._clock.now_s)


@dataclass(frozen=True, slots=True)
class Options:
    """Find the share of requests within the targets: of a planner, and of each fixed split."""

    load: str = option("swinging", f"{', '.join(LOADS)}, or a Mooncake trace's file")
    workers: int = option(8, "of every contender", least=2)
    rate: float = option(1.0, "of a load: times its own; of a trace: requests/s", least=0.01)
    seconds: float = option(120.0, "in which requests arrive", least=1)
    phase: float = option(60.0, "seconds of each kind, where the load swings", least=1)
    split: tuple[str, ...] = option(
        (), "fixed splits or numbers, as 3P 5D, 4 workers (default: all)"
    )
    begin: str = option("", "split in which the planner begins (default: the middle one)")
    max_workers: int = option(0, "most that the planner starts, of both roles; 0: it moves roles")
    start: float = option(30.0, "seconds from a worker's start until it serves", least=0)
    targets: str = option("ttft:1000 tpot:20", "in ms, of each request; also in force for workers")
    seed: int = option(1, "of lengths and arrivals")

    def __post_init__(self) -> None:
        both_targets(self.targets)

    @property
    def slos(self) -> dict[str, float]:
        """The limits in ms."""
        return both_targets(self.targets)


def arrivals_of(options: Options) -> Arrivals:
    """Return the requests of a load. Raises ConfigError for one that is none."""
    if options.load not in LOADS:
        path, max_tokens = Path(options.load), WORKER.max_tokens
        if not path.is_file():
            raise ConfigError(
                f"--load {options.load}: neither a file nor one of {', '.join(LOADS)}"
            )
        return of_trace(
            path, options.rate, options.seconds, options.seed, WORKER.block_size, max_tokens
        )
    rng = random.Random(f"{options.load}/{options.seed}")
    found: list[tuple[float, int, int]] = []
    for kind, share, phases in LOADS[options.load]:
        rate = options.rate * share * kind.rate * options.workers
        at_s = rng.expovariate(rate)
        while at_s < options.seconds:
            if int(at_s / options.phase) % 2 in phases:
                found.append(
                    (at_s, rng.randint(*kind.prompt_tokens), rng.randint(*kind.answer_tokens))
                )
            at_s += rng.expovariate(rate)
    return [
        (PlannedRequest(index, num_prompt, num_answer, [], at_s), at_s)
        for index, (at_s, num_prompt, num_answer) in enumerate(sorted(found))
    ]


def setup_of(options: Options) -> Setup:
    """Return everything but the layout and the load."""
    handoff = HandoffTime(0.002, 0.00001)
    return Setup(
        WORKER, disagg_of(options.slos), PrefillConfig(), RouterConfig(), handoff, options.seed
    )


def contenders(options: Options) -> dict[str, Layout]:
    """Return the layouts beside the planner: the splits, or each number of workers."""
    if not options.max_workers:
        return {each.name: each for each in layouts_of(options.workers) if "P " in each.name}
    return {
        f"{count} workers": layouts_of(count)[-1] for count in range(1, options.max_workers + 1)
    }


def rows(options: Options, tell: Callable[[str], None]) -> Iterator[tuple[str, float, str]]:
    """Yield each contender, its share within the targets, and its moves in words."""
    fixed, most = contenders(options), options.max_workers
    middle = f"{options.workers // 2}P {options.workers - options.workers // 2}D"
    begin = options.begin or (f"{options.workers} workers" if most else middle)
    for name in (*options.split, begin):
        if name not in fixed:
            raise ConfigError(f"{name}: none of {', '.join(fixed)}")
    arrivals, setup = arrivals_of(options), setup_of(options)
    tell(f"{options.load}: {len(arrivals)} requests")

    def share_of(cluster: VirtualCluster) -> float:
        records = cluster.replay(arrivals).records
        return sum(meets(record, options.slos) for record in records) / len(records)

    config = PlannerConfig(max_workers=most or None)
    planned = PlannedCluster(fixed[begin], setup, config, options.start)
    share = share_of(planned)
    moves = [f"{_in_words(change)} at {at_s:.0f} s" for at_s, change in planned.moves]
    if most:
        moves.append(f"{planned.worker_s:.0f} worker-seconds")
    yield f"planner, from {begin}", share, ", ".join(moves) or "none"
    for name in options.split or fixed:
        yield name, share_of(VirtualCluster(fixed[name], setup)), ""


def _in_words(change: Change) -> str:
    return {"role": change.role, "start": f"+{change.count}", "stop": "-1"}[change.kind]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the shares, and the planner's over the best fixed split's; return the exit status."""
    options = parse(Options, MODULE, arguments)
    found: dict[str, float] = {}
    try:
        for name, share, moves in rows(options, say):
            found[name] = share
            print(f"{name}: {share:.3f}" + (f" (moves: {moves})" if moves else ""), flush=True)
    except (TandemError, OSError) as error:
        say(f"error: {error}")
        return EXIT_FAILED
    planned, *fixed = found.values()
    if max(fixed) > 0:
        print(f"planner / best of the fixed ones: {planned / max(fixed):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
