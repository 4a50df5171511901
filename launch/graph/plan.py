"""From a graph of services and a machine to the processes to start. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.launch.devices import GpuInfo
from tandem.launch.graph.settings import ServiceNeeds
from tandem.launch.serve.plan import THREAD_VARIABLES
from tandem.runtime.errors import ConfigError
from tandem.sdk.service.config import SERVICE_ARGS
from tandem.sdk.service.spec import ServiceSpec

SYSTEM_PORT_VARIABLE = "TANDEM_SYSTEM_PORT"


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
        """Its GPUs, or CPU, and its port, for users."""
        device = ", ".join(f"GPU {gpu.index} ({gpu.name})" for gpu in self.gpus) or "CPU"
        return device if self.system_port is None else f"{device}, port {self.system_port}"


def plan_services(
    wanted: Sequence[tuple[ServiceSpec, ServiceNeeds]],
    machine: Machine,
    first_port: int | None = None,
) -> list[ServicePlan]:
    """Give every instance the resources it needs, each GPU to one instance only.

    `first_port` is the system port of the first instance, and the others get the ports after it;
    with 0 each takes a free one. Raises ConfigError naming the service that does not fit.
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
    num_gpus, num_cpus, memory_bytes = 0, 0.0, 0
    for spec, needs in wanted:
        resources, count = needs.resources, needs.num_workers
        num_gpus += count * resources.num_gpus
        num_cpus += count * (resources.num_cpus or 0)
        memory_bytes += count * (resources.memory_bytes or 0)
        each = f"{count} x " if count > 1 else ""
        if num_gpus > len(machine.gpus):
            has = f"{len(machine.gpus)} GPU{'s' if len(machine.gpus) != 1 else ''}"
            raise _too_much(spec, "gpu", f"{each}{resources.num_gpus} GPUs", num_gpus, has)
        if num_cpus > machine.num_cores:
            has = f"{machine.num_cores} cores"
            raise _too_much(spec, "cpu", f"{each}{resources.num_cpus:g} cores", num_cpus, has)
        if memory_bytes > machine.memory_bytes:
            asked = f"{each}{_gib(resources.memory_bytes or 0)} of memory"
            total = _gib(memory_bytes)
            raise _too_much(spec, "memory", asked, total, _gib(machine.memory_bytes))


def _too_much(
    spec: ServiceSpec, resource: str, asked: str, total: float | str, has: str
) -> ConfigError:
    sum_of_all = f"{total:g}" if isinstance(total, float | int) else total
    return ConfigError(
        f"{spec.name} asks for {asked}, which with the services before it makes {sum_of_all}; this "
        f"machine has {has}. Ask for less: --{spec.name}.{SERVICE_ARGS}.resources.{resource}=VALUE",
        param=f"{spec.name}.{SERVICE_ARGS}.resources.{resource}",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
