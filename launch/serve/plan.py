"""From a topology, a config and a machine to the processes to start. Pure."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.config.model import EffectiveConfig, find_field, is_secret
from tandem.config.sources import Setting
from tandem.config.topology import Gpu, RoleSpec, Topology
from tandem.runtime.errors import ConfigError
from tandem.runtime.local.devices import GpuInfo, require_gpu
from tandem.runtime.process.names import is_config_variable
from tandem.runtime.wire.cluster_messages import Role

START_ORDER: tuple[Role, ...] = ("worker", "decode", "prefill", "frontend")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class RolePlan:
    """One worker or frontend to start, on `gpus` of this machine, or on the CPU."""

    name: str  # decode-0
    role: Role
    config: EffectiveConfig
    gpus: tuple[GpuInfo, ...] = ()  # one for each process that computes its model
    variables: Mapping[str, str] = field(default_factory=dict)  # added to its environment

    @property
    def device(self) -> GpuInfo | None:
        """The first GPU, None: the CPU."""
        return next(iter(self.gpus), None)

    @property
    def placement(self) -> str:
        """The name of its place, for people."""
        if self.device is None:
            return "CPU"
        return self.device.name if len(self.gpus) == 1 else f"{len(self.gpus)} x {self.device.name}"

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment, without config variables: the config file has their values.

        Secrets are the exception: they are in the environment, and not in the file.
        """
        kept = {k: v for k, v in inherited.items() if not is_config_variable(k)}
        own = {"PYTHONUNBUFFERED": "1", **self.variables, **self.secret_variables()}
        return {**kept, **own}

    def secret_variables(self) -> dict[str, str]:
        """Return the environment that has the config's secrets."""
        secrets = [s.key for s in self.config.settings.values() if is_secret(find_field(s))]
        return self.config.variables(secrets)

    def config_sections(self) -> dict[str, dict[str, object]]:
        """Return the content of the config file: values other than defaults and secrets."""
        sections: dict[str, dict[str, object]] = {}
        for setting in self.config.settings.values():
            if not is_secret(find_field(setting)):
                section, _, name = setting.key.partition(".")
                sections.setdefault(section, {})[name] = setting.value
        return sections


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """All processes of a topology, in the order to start them; `notes` are for the user."""

    roles: tuple[RolePlan, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one worker: GPUs that up to `num_sharing` workers share, or none: the CPU."""

    spec: RoleSpec
    ordinal: int
    gpus: tuple[GpuInfo, ...]
    num_sharing: int


def make_plan(
    topology: Topology, config: EffectiveConfig, gpus: Sequence[GpuInfo], num_cores: int
) -> LaunchPlan:
    """Place every instance. Raise ConfigError when a requested GPU is not there."""
    workers = _in_start_order(topology)
    free = _free_gpus(workers, _automatic_gpus(config, gpus))
    widths = [_width(spec, topology, config) for spec, _ in workers]
    placements = _place(workers, widths, gpus, free)
    num_threads = _num_threads(placements, num_cores)
    roles = [_plan_worker(p, topology, config, num_threads) for p in placements]
    frontend = next(spec for spec in topology.roles if spec.role == "frontend")
    roles.append(plan_frontend(config.with_defaults([*topology.settings, *frontend.settings])))
    return LaunchPlan(tuple(roles), tuple(_notes(config, placements, free, num_cores)))


def plan_one_more(
    role: Role,
    topology: Topology,
    config: EffectiveConfig,
    others: Sequence[RolePlan],
    gpus: Sequence[GpuInfo],
    num_cores: int,
) -> RolePlan:
    """Place one worker beside others. Raise ConfigError where too few GPUs have no worker."""
    spec = next((each for each in topology.roles if each.role == role), RoleSpec(role, 0))
    names = {each.name for each in others}
    ordinal = next(each for each in itertools.count() if f"{role}-{each}" not in names)
    automatic = [] if "cpu" in spec.gpus else _automatic_gpus(config, gpus)
    taken = {gpu for each in others for gpu in each.gpus}
    width = _width(spec, topology, config)
    mine = tuple(gpu for gpu in automatic if gpu not in taken)[:width]
    if automatic and len(mine) < width:
        raise ConfigError(
            f"{len(mine)} of {_gpus(len(automatic))} are without a worker: one more needs {width}"
        )
    num_threads = max(1, num_cores // (len(others) + 1))
    return _plan_worker(Placement(spec, ordinal, mine, 1), topology, config, num_threads)


def _width(spec: RoleSpec, topology: Topology, config: EffectiveConfig) -> int:
    """Return the GPUs that each worker of a role computes with."""
    engine = config.with_defaults([*topology.settings, *spec.settings]).config.engine
    return 1 if engine.emulate else engine.tp


def plan_frontend(config: EffectiveConfig) -> RolePlan:
    """Return the plan of the frontend, which computes nothing."""
    variables = dict.fromkeys(THREAD_VARIABLES, "1")
    return RolePlan("frontend-0", "frontend", config, variables=variables)


def _automatic_gpus(config: EffectiveConfig, gpus: Sequence[GpuInfo]) -> Sequence[GpuInfo]:
    """Return the choice for `gpu: auto`: all, unless engine.device names one or the CPU.

    Emulated devices need none.
    """
    if config.config.engine.emulate is not None:
        return []
    kind, _, indexes = config.config.engine.device.partition(":")
    if kind == "cuda":
        asker = f"engine.device {kind}:{indexes} ({config.origin('engine.device')})"
        named = [int(index) for index in indexes.split(",")]
        return [require_gpu(index, asker, "engine.device cpu", gpus) for index in named]
    return [] if kind == "cpu" else gpus


def _in_start_order(topology: Topology) -> list[tuple[RoleSpec, int]]:
    """Return (spec, ordinal) of every worker."""
    return [
        (spec, ordinal)
        for role in START_ORDER
        for spec in topology.roles
        if spec.role == role and role != "frontend"
        for ordinal in range(spec.count)
    ]


def _free_gpus(
    workers: Sequence[tuple[RoleSpec, int]], automatic: Sequence[GpuInfo]
) -> list[GpuInfo]:
    """Return the GPUs that no worker names; all of them where every one is named."""
    named = [index for spec, ordinal in workers for index in _named(spec.gpus[ordinal])]
    return [gpu for gpu in automatic if gpu.index not in named] or list(automatic)


def _named(gpu: Gpu) -> tuple[int, ...]:
    """Return the GPUs that a worker names."""
    if isinstance(gpu, int):
        return (gpu,)
    return gpu if isinstance(gpu, tuple) else ()


def _gpus(number: int) -> str:
    return f"{number} GPU{'' if number == 1 else 's'}"


def _place(
    workers: Sequence[tuple[RoleSpec, int]],
    widths: Sequence[int],
    gpus: Sequence[GpuInfo],
    free: Sequence[GpuInfo],
) -> list[Placement]:
    """Give every worker the GPUs that it names, or the free ones in turn: as many as its width."""
    turns = itertools.cycle(free)
    taken: list[tuple[GpuInfo, ...]] = []
    for (spec, ordinal), width in zip(workers, widths, strict=True):
        gpu = spec.gpus[ordinal]
        asker = f"{spec.where}: roles.{spec.role}.gpu"
        mine: tuple[GpuInfo, ...] = ()
        if named := _named(gpu):
            mine = tuple(require_gpu(i, f"{asker} {i}", "`gpu: cpu`", gpus) for i in named)
        elif gpu == "auto" and free:
            mine = tuple(itertools.islice(turns, min(width, len(free))))
        if mine and len(set(mine)) < max(width, len(mine)):
            raise ConfigError(
                f"{asker}: {_gpus(len(set(mine)))} for a worker of engine.tp {width}; give it as "
                f"many, as in `gpu: {list(range(width))}`, another --tp, or `gpu: cpu`",
                param="gpu",
            )
        if len(mine) > width:
            raise ConfigError(
                f"{asker}: {len(mine)} GPUs for each worker, whose engine.tp is {width}",
                param="gpu",
            )
        taken.append(mine)
    num_workers = Counter(gpu for mine in taken for gpu in mine)
    return [
        Placement(spec, ordinal, mine, max((num_workers[gpu] for gpu in mine), default=1))
        for (spec, ordinal), mine in zip(workers, taken, strict=True)
    ]


def _num_threads(placements: Sequence[Placement], num_cores: int) -> int:
    return max(1, num_cores // len(placements))


def _notes(
    config: EffectiveConfig,
    placements: Sequence[Placement],
    free: Sequence[GpuInfo],
    num_cores: int,
) -> Iterator[str]:
    """Yield for the user how workers share GPUs and cores."""
    if (profile := config.config.engine.emulate) is not None:
        pace = config.config.runtime.pace
        slower = f"; time runs {pace:g} times slower" if pace > 1 else ""
        yield f"emulated {profile}: steps take its time, and compute nothing{slower}"
        return
    num_auto = sum(p.spec.gpus[p.ordinal] == "auto" for p in placements)
    if num_auto and not free:
        yield "no GPU in use: workers run on the CPU"
    elif any(p.num_sharing > 1 for p in placements if p.spec.gpus[p.ordinal] == "auto"):
        yield f"{num_auto} workers share {_gpus(len(free))}"
    if len(placements) > 1 and not any(placement.gpus for placement in placements):
        num_threads = _num_threads(placements, num_cores)
        each = f"{num_threads} compute thread{'s' if num_threads > 1 else ''} each"
        yield f"{len(placements)} workers share {num_cores} cores: {each}"


def _plan_worker(
    placement: Placement, topology: Topology, config: EffectiveConfig, num_threads: int
) -> RolePlan:
    spec, gpus = placement.spec, placement.gpus
    origin = "launcher"
    settings = []
    if gpus and placement.num_sharing > 1:
        # each worker takes its share of the memory that one alone would take
        fraction = round(config.config.engine.kv_memory_fraction / placement.num_sharing, 3)
        settings.append(Setting("engine.kv_memory_fraction", fraction, origin))
    config = config.with_defaults([*settings, *topology.settings, *spec.settings])
    num_threads = max(1, num_threads // config.config.engine.tp)
    config = config.with_defaults([Setting("engine.threads", num_threads, origin)])
    # CUDA_VISIBLE_DEVICES shows the process its own GPUs alone, the first of which is cuda:0
    engine_device = Setting("engine.device", "cuda:0" if gpus else "cpu", origin)
    config = config.with_settings([engine_device])
    chosen_threads = str(config.config.engine.threads or num_threads)
    variables = dict.fromkeys(THREAD_VARIABLES, chosen_threads)
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.visible_id for gpu in gpus)
    return RolePlan(f"{spec.role}-{placement.ordinal}", spec.role, config, gpus, variables)
