"""From a topology, a config and a machine to the processes to start. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandem.launch.config.model import EffectiveConfig, find_field, is_secret
from tandem.launch.config.sources import ENV_PREFIX, Setting, env_name
from tandem.launch.devices import GpuInfo, require_gpu
from tandem.launch.serve.topology import RoleSpec, Topology
from tandem.runtime.messages import Role

START_ORDER: tuple[Role, ...] = ("decode", "prefill", "frontend")
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
        """Its environment. Config variables are left out: its config file has their values."""
        kept = {k: v for k, v in inherited.items() if not k.startswith(ENV_PREFIX)}
        secrets = {
            env_name(s.key): s.value.get_secret_value()
            if hasattr(s.value, "get_secret_value")
            else str(s.value)
            for s in self.config.settings.values()
            if s.value is not None and is_secret(find_field(s))
        }
        return {**kept, "PYTHONUNBUFFERED": "1", **self.variables, **secrets}

    def config_sections(self) -> dict[str, dict[str, object]]:
        """What its config file says: every value that is not a default, but no secret."""
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
    """Where one worker runs; `num_sharing` workers are on its GPU, itself among them."""

    spec: RoleSpec
    ordinal: int
    device: GpuInfo | None
    num_sharing: int = 1


def make_plan(
    topology: Topology, config: EffectiveConfig, gpus: Sequence[GpuInfo], num_cores: int
) -> LaunchPlan:
    """Places every instance. Raises ConfigError when a GPU that is asked for is not there."""
    notes: list[str] = []
    placements = _place(topology, gpus, _automatic_gpus(config, gpus), notes)
    num_threads = max(1, num_cores // len(placements))
    if all(placement.device is None for placement in placements) and len(placements) > 1:
        each = f"{num_threads} compute thread{'s' if num_threads > 1 else ''} each"
        notes.append(f"{len(placements)} workers share {num_cores} cores: {each}")
    roles = [_plan_worker(p, topology, config, num_threads) for p in placements]
    frontend = next(spec for spec in topology.roles if spec.role == "frontend")
    config = config.with_defaults([*topology.settings, *frontend.settings])
    variables = dict.fromkeys(THREAD_VARIABLES, "1")
    roles.append(RolePlan("frontend-0", "frontend", config, variables=variables))
    return LaunchPlan(tuple(roles), tuple(notes))


def _automatic_gpus(config: EffectiveConfig, gpus: Sequence[GpuInfo]) -> Sequence[GpuInfo]:
    """What `gpu: auto` may choose from: all, unless engine.device names one or the CPU."""
    kind, _, index = config.config.engine.device.partition(":")
    if kind == "cuda":
        asker = f"engine.device {kind}:{index} ({config.origin('engine.device')})"
        return [require_gpu(int(index), asker, "engine.device cpu", gpus)]
    return [] if kind == "cpu" else gpus


def _place(
    topology: Topology,
    gpus: Sequence[GpuInfo],
    automatic: Sequence[GpuInfo],
    notes: list[str],
) -> list[Placement]:
    workers = [
        (spec, ordinal)
        for role in START_ORDER
        for spec in topology.roles
        if spec.role == role and role != "frontend"
        for ordinal in range(spec.count)
    ]
    asked = [spec.gpus[ordinal] for spec, ordinal in workers]
    free = [gpu for gpu in automatic if gpu.index not in asked] or list(automatic)
    num_auto = asked.count("auto")
    if num_auto and not free:
        notes.append("no GPU in use: workers run on the CPU")
    elif num_auto > len(free):
        notes.append(f"{num_auto} workers share {len(free)} GPU{'s' if len(free) > 1 else ''}")
    placements: list[Placement] = []
    num_placed = 0
    for (spec, ordinal), gpu in zip(workers, asked, strict=True):
        device = None
        if isinstance(gpu, int):
            asker = f"{spec.where}: roles.{spec.role}.gpu {gpu}"
            device = require_gpu(gpu, asker, "`gpu: cpu`", gpus)
        elif gpu == "auto" and free:
            device = free[num_placed % len(free)]
            num_placed += 1
        placements.append(Placement(spec, ordinal, device))
    on_device = [p.device for p in placements]
    return [replace(p, num_sharing=on_device.count(p.device)) for p in placements]


def _plan_worker(
    placement: Placement, topology: Topology, config: EffectiveConfig, num_threads: int
) -> RolePlan:
    spec, device = placement.spec, placement.device
    origin = "launcher"
    settings = [
        Setting("engine.threads", num_threads, origin),
    ]
    if device is not None and placement.num_sharing > 1:
        # each takes its share of the memory that one alone would take
        fraction = round(config.config.engine.kv_memory_fraction / placement.num_sharing, 3)
        settings.append(Setting("engine.kv_memory_fraction", fraction, origin))
    config = config.with_defaults([*settings, *topology.settings, *spec.settings])
    # CUDA_VISIBLE_DEVICES shows the process one GPU, which is its first
    where = Setting("engine.device", "cpu" if device is None else "cuda:0", origin)
    config = config.with_settings([where])
    chosen_threads = str(config.config.engine.threads or num_threads)
    variables = dict.fromkeys(THREAD_VARIABLES, chosen_threads)
    if device is not None:
        variables["CUDA_VISIBLE_DEVICES"] = device.visible_id
    return RolePlan(f"{spec.role}-{placement.ordinal}", spec.role, config, device, variables)
