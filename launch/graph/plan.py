"""From a graph of services and a machine to the processes to start. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.launch.graph.settings import ServiceNeeds
from tandem.launch.serve.plan import THREAD_VARIABLES
from tandem.runtime.errors import ConfigError
from tandem.runtime.local.devices import GpuInfo
from tandem.sdk.service.config import SERVICE_ARGS
from tandem.sdk.service.spec import ServiceSpec

SYSTEM_PORT_VARIABLE = "TANDEM_SYSTEM_PORT"
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of this machine."""

    num_cores: int
    memory_bytes: int
    gpus: Sequence[GpuInfo] = ()


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """One process to start, `variables` added to its environment."""

    name: str  # Backend-0
    service: str
    gpus: tuple[GpuInfo, ...]
    variables: Mapping[str, str]
    system_port: int | None = None  # for health and metrics; None: no such server

    @property
    def placement(self) -> str:
        """For users: its GPUs, or CPU, and its port."""
        device = ", ".join(f"GPU {gpu.index} ({gpu.name})" for gpu in self.gpus) or "CPU"
        return device if self.system_port is None else f"{device}, port {self.system_port}"


def plan_services(
    wanted: Sequence[tuple[ServiceSpec, ServiceNeeds]],
    machine: Machine,
    first_port: int | None = None,
) -> list[ServicePlan]:
    """Give every instance the resources it needs, each GPU to one instance only.

    `first_port` is the system port of the first instance, and the others get the ports after it;
    with 0 each takes a free one. Raise ConfigError naming the service that does not fit.
    """
    _check(wanted, machine)
    num_instances = sum(needs.num_workers for _, needs in wanted)
    share = max(1, machine.num_cores // max(1, num_instances))
    free = list(machine.gpus)
    plans: list[ServicePlan] = []
    for spec, needs in wanted:
        for ordinal in range(needs.num_workers):
            mine, free = free[: needs.resources.num_gpus], free[needs.resources.num_gpus :]
            asked = needs.resources.num_cpus
            num_threads = share if asked is None else max(1, int(asked))
            variables = dict.fromkeys(THREAD_VARIABLES, str(num_threads))
            # an empty list hides all GPUs from an instance that needs none
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.visible_id for gpu in mine)
            port = first_port + len(plans) if first_port else first_port
            if port is not None:
                variables[SYSTEM_PORT_VARIABLE] = str(port)
            name = f"{spec.name}-{ordinal}"
            plans.append(ServicePlan(name, spec.name, tuple(mine), variables, port))
    return plans


def _check(wanted: Sequence[tuple[ServiceSpec, ServiceNeeds]], machine: Machine) -> None:
    limits = {
        "gpu": (float(len(machine.gpus)), "GPUs"),
        "cpu": (float(machine.num_cores), "cores"),
        "memory": (machine.memory_bytes / GIB, "GiB of memory"),
    }
    totals = dict.fromkeys(limits, 0.0)
    for spec, needs in wanted:
        resources = needs.resources
        asked = {
            "gpu": float(resources.num_gpus),
            "cpu": resources.num_cpus or 0.0,
            "memory": (resources.memory_bytes or 0) / GIB,
        }
        for name, (limit, unit) in limits.items():
            totals[name] += needs.num_workers * asked[name]
            if totals[name] > limit:
                count = f"{needs.num_workers} x " if needs.num_workers > 1 else ""
                key = f"{spec.name}.{SERVICE_ARGS}.resources.{name}"
                raise ConfigError(
                    f"{spec.name} asks for {count}{asked[name]:.4g} {unit}, which with the "
                    f"services before it makes {totals[name]:.4g}; this machine has {limit:.4g}. "
                    f"Ask for less: --{key}=VALUE",
                    param=key,
                )
