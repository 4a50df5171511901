"""Topology files: the roles of one machine, their counts, GPUs and config overrides."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import yaml

from tandem.config.model import find_field
from tandem.config.sources import Setting, entries, is_empty, plain_value, read_yaml
from tandem.runtime.errors import ConfigError
from tandem.runtime.process.names import did_you_mean
from tandem.runtime.wire.cluster_messages import Role

TOPOLOGIES = Path(__file__).with_name("topologies")
ROLES: tuple[str, ...] = get_args(Role)
KEYS_OF_ROLES: Mapping[str, Role] = {"both": "worker", "decode": "decode", "prefill": "prefill"}
ROLE_KEYS = ("count", "gpu", "config")
TOP_KEYS = ("description", "roles", "config")
MAX_COUNT = 64

Gpu = int | tuple[int, ...] | Literal["auto", "cpu"]  # several of one instance: one a rank


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """`count` instances of a role; `gpus` has one entry per instance (none for a frontend)."""

    role: Role
    count: int
    gpus: tuple[Gpu, ...] = ()
    settings: tuple[Setting, ...] = ()
    where: str = ""  # file:line, for errors


@dataclass(frozen=True, slots=True)
class Topology:
    """The roles that `tandem serve` starts."""

    name: str
    description: str
    roles: tuple[RoleSpec, ...]
    settings: tuple[Setting, ...] = ()  # for every role

    def count(self, role: Role) -> int:
        return sum(spec.count for spec in self.roles if spec.role == role)


def topology_names() -> list[str]:
    return sorted(path.stem for path in TOPOLOGIES.glob("*.yaml"))


def load_topology(name_or_path: str) -> Topology:
    """Load a bundled topology by name, or a file. Raise ConfigError naming file, line and key."""
    if name_or_path in topology_names():
        return parse_topology(TOPOLOGIES / f"{name_or_path}.yaml")
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return parse_topology(path)
    hint = did_you_mean(name_or_path, topology_names())
    raise ConfigError(
        f"{name_or_path!r} is neither a topology nor a file; {hint}", param="topology"
    )


def workers_topology(count: int) -> Topology:
    """Return the topology of `count` workers that have both roles."""
    base = load_topology("workers")
    auto: Gpu = "auto"
    roles = tuple(
        replace(spec, count=count, gpus=(auto,) * count) if spec.role == "worker" else spec
        for spec in base.roles
    )
    plural = "s, each" if count > 1 else ":"
    return replace(base, description=f"{count} worker{plural} prefill and decode", roles=roles)


def parse_topology(path: Path) -> Topology:
    """Read a topology file. Raise ConfigError naming file, line and key."""
    description = ""
    roles: tuple[RoleSpec, ...] = ()
    shared: tuple[Setting, ...] = ()
    for key, line, node in entries(read_yaml(path), path, "a topology"):
        where = f"{path}:{line}"
        if key == "description":
            description = str(plain_value(node, path))
        elif key == "roles":
            roles = tuple(
                _parse_role(role, value, path, role_line)
                for role, role_line, value in entries(node, path, "roles")
            )
        elif key == "config":
            shared = _parse_settings(node, path)
        else:
            raise ConfigError(f"{where}: unknown key {key}; {did_you_mean(key, TOP_KEYS)}")
    topology = Topology(path.stem, description, roles, shared)
    _check_counts(topology, path)
    return topology


def _check_counts(topology: Topology, path: Path) -> None:
    if topology.count("frontend") != 1:
        raise ConfigError(f"{path}: roles.frontend.count must be 1: clients use one address")
    if topology.count("worker") + topology.count("decode") < 1:
        raise ConfigError(f"{path}: roles.worker.count must be at least 1: it generates the tokens")


def _parse_role(role: str, node: yaml.Node, path: Path, line: int) -> RoleSpec:
    where = f"{path}:{line}"
    if role not in ROLES:
        raise ConfigError(f"{where}: unknown role {role}; {did_you_mean(role, ROLES)}")
    count, gpu = 1, None
    settings: tuple[Setting, ...] = ()
    for key, key_line, value in entries(None if is_empty(node) else node, path, f"roles.{role}"):
        here = f"{path}:{key_line}: roles.{role}.{key}"
        if key == "count":
            count = _parse_count(plain_value(value, path), here)
        elif key == "gpu":
            gpu = plain_value(value, path)
            where = f"{path}:{key_line}"
        elif key == "config":
            settings = _parse_settings(value, path)
        else:
            raise ConfigError(f"{here}: unknown key; {did_you_mean(key, ROLE_KEYS)}")
    gpus = _parse_gpus(role, gpu, count, f"{where}: roles.{role}.gpu")
    return RoleSpec(role, count, gpus, settings, where)  # type: ignore[arg-type]


def _parse_count(value: object, here: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
        raise ConfigError(f"{here} = {value!r}: must be a whole number from 0 to {MAX_COUNT}")
    return value


def _parse_gpus(role: str, value: object, count: int, here: str) -> tuple[Gpu, ...]:
    if role == "frontend":
        if value is not None:
            raise ConfigError(f"{here} = {value!r}: a frontend uses no GPU, remove the key")
        return ()
    if value is None or value in ("auto", "cpu"):
        everywhere: Gpu = "cpu" if value == "cpu" else "auto"
        return (everywhere,) * count
    indexes = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in indexes):
        raise ConfigError(f"{here} = {value!r}: must be auto, cpu, an index or a list of indexes")
    each = len(indexes) // max(1, count)
    if len(indexes) != count * each or (indexes and not each):
        raise ConfigError(
            f"{here} = {value!r}: {len(indexes)} GPUs for count {count}; give one GPU per instance"
            ", or for each as many as its engine.tp"
        )
    if each == 1:
        return tuple(indexes)
    return tuple(tuple(indexes[first : first + each]) for first in range(0, len(indexes), each))


def _parse_settings(node: yaml.Node, path: Path) -> tuple[Setting, ...]:
    if is_empty(node):
        return ()
    settings: list[Setting] = []
    for key, line, value in entries(node, path, "config"):
        setting = Setting(key, plain_value(value, path), f"{path}:{line}")
        find_field(setting)
        settings.append(setting)
    return tuple(settings)
