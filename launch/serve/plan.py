"""From a topology, a config and a machine to the processes to start. Pure."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.config.model import EffectiveConfig, find_field, is_secret
from tandem.config.sources import Setting
from tandem.config.topology import RoleSpec, Topology
from tandem.runtime.local.devices import GpuInfo, require_gpu
from tandem.runtime.process.names import is_config_variable
from tandem.runtime.wire.cluster_messages import Role

START_ORDER: tuple[Role, ...] = ("worker", "decode", "prefill", "frontend")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class RolePlan:
    """One process to start; `device` is a GPU of this machine, or None for the CPU."""

    name: str  # decode-0
    role: Role
    config: EffectiveConfig
    device: GpuInfo | None = None
    variables: Mapping[str, str] = field(default_factory=dict)  # added to its environment

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
    """The place of one worker: a GPU that `num_sharing` workers share, or None for the CPU."""

    spec: RoleSpec
    ordinal: int
    device: GpuInfo | None
    num_sharing: int


def make_plan(
    topology: Topology, config: EffectiveConfig, gpus: Sequence[GpuInfo], num_cores: int
) -> LaunchPlan:
    """Place every instance. Raise ConfigError when a requested GPU is not there."""
    workers = _in_start_order(topology)
    free = _free_gpus(workers, _automatic_gpus(config, gpus))
    placements = _place(workers, gpus, free)
    num_threads = _num_threads(placements, num_cores)
    roles = [_plan_worker(p, topology, config, num_threads) for p in placements]
    frontend = next(spec for spec in topology.roles if spec.role == "frontend")
    roles.append(plan_frontend(config.with_defaults([*topology.settings, *frontend.settings])))
    return LaunchPlan(tuple(roles), tuple(_notes(config, placements, free, num_cores)))


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
    kind, _, index = config.config.engine.device.partition(":")
    if kind == "cuda":
        asker = f"engine.device {kind}:{index} ({config.origin('engine.device')})"
        return [require_gpu(int(index), asker, "engine.device cpu", gpus)]
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
    named = [spec.gpus[ordinal] for spec, ordinal in workers]
    return [gpu for gpu in automatic if gpu.index not in named] or list(automatic)


def _place(
    workers: Sequence[tuple[RoleSpec, int]], gpus: Sequence[GpuInfo], free: Sequence[GpuInfo]
) -> list[Placement]:
    """Give every worker the GPU that it names, or the free ones in turn."""
    turns = itertools.cycle(free)
    devices: list[GpuInfo | None] = []
    for spec, ordinal in workers:
        gpu = spec.gpus[ordinal]
        if isinstance(gpu, int):
            asker = f"{spec.where}: roles.{spec.role}.gpu {gpu}"
            devices.append(require_gpu(gpu, asker, "`gpu: cpu`", gpus))
        else:
            devices.append(next(turns, None) if gpu == "auto" else None)
    return [
        Placement(spec, ordinal, device, devices.count(device))
        for (spec, ordinal), device in zip(workers, devices, strict=True)
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
    elif num_auto > len(free):
        yield f"{num_auto} workers share {len(free)} GPU{'s' if len(free) > 1 else ''}"
    if len(placements) > 1 and all(placement.device is None for placement in placements):
        num_threads = _num_threads(placements, num_cores)
        each = f"{num_threads} compute thread{'s' if num_threads > 1 else ''} each"
        yield f"{len(placements)} workers share {num_cores} cores: {each}"


def _plan_worker(
    placement: Placement, topology: Topology, config: EffectiveConfig, num_threads: int
) -> RolePlan:
    spec, device = placement.spec, placement.device
    origin = "launcher"
    settings = []
    if device is not None and placement.num_sharing > 1:
        # each worker takes its share of the memory that one alone would take
        fraction = round(config.config.engine.kv_memory_fraction / placement.num_sharing, 3)
        settings.append(Setting("engine.kv_memory_fraction", fraction, origin))
    config = config.with_defaults([*settings, *topology.settings, *spec.settings])
    num_threads = max(1, num_threads // config.config.engine.tp)
    config = config.with_defaults([Setting("engine.threads", num_threads, origin)])
    # CUDA_VISIBLE_DEVICES shows the process one GPU, which is its first
    engine_device = Setting("engine.device", "cpu" if device is None else "cuda:0", origin)
    config = config.with_settings([engine_device])
    chosen_threads = str(config.config.engine.threads or num_threads)
    variables = dict.fromkeys(THREAD_VARIABLES, chosen_threads)
    if device is not None:
        variables["CUDA_VISIBLE_DEVICES"] = device.visible_id
    return RolePlan(f"{spec.role}-{placement.ordinal}", spec.role, config, device, variables)
