"""Settings of services, from a YAML file and from `--Class.key=value` flags."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tandem.config.flags import Flag
from tandem.config.sources import entries, is_empty, plain_value, read_yaml
from tandem.runtime.errors import ConfigError
from tandem.sdk.service.config import COMMON, SERVICE_ARGS, ServiceConfig, unknown_key
from tandem.sdk.service.spec import Resources, ServiceSpec, parse_workers

ARGS_KEYS = ("workers", "resources")


@dataclass(frozen=True, slots=True)
class ServiceNeeds:
    """The number of instances of a service, and the resources of each."""

    num_workers: int
    resources: Resources


def read_services(
    file: Path | None, flags: Iterable[Flag], known: Sequence[ServiceSpec]
) -> ServiceConfig:
    """Return the settings of file and flags; flags win. Raise ConfigError naming line or flag."""
    names = [COMMON, *(spec.name for spec in known)]
    sections: dict[str, dict[str, Any]] = {}
    if file is not None:
        for name, line, node in entries(read_yaml(file), file, "the file"):
            _check_name(name, f"{file}:{line}", names)
            sections[name] = {} if is_empty(node) else _mapping(node, file, name)
    for flag in flags:
        _check_name(flag.section, f"flag {flag.name}", names)
        _put(sections.setdefault(flag.section, {}), flag)
    config = ServiceConfig(sections)
    config.check_common()
    return config


def needs_of(spec: ServiceSpec, config: ServiceConfig) -> ServiceNeeds:
    """Return the needs in `ServiceArgs`, else those in the decorator. Raise ConfigError."""
    where = f"{spec.name}.{SERVICE_ARGS}"
    given = config.get(spec.name, {}).get(SERVICE_ARGS, {})
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be a mapping with {' and '.join(ARGS_KEYS)}")
    for key in given:
        if key not in ARGS_KEYS:
            raise unknown_key(where, str(key), ARGS_KEYS)
    resources = given.get("resources", {})
    if not isinstance(resources, Mapping):
        raise ConfigError(f"{where}.resources must be a mapping")
    workers = given.get("workers", spec.num_workers)
    return ServiceNeeds(
        num_workers=parse_workers(workers, f"{where}.workers"),
        resources=spec.resources.updated(resources, f"{where}.resources"),
    )


def _check_name(name: str, where: str, known: Sequence[str]) -> None:
    if name not in known:
        raise unknown_key(where, name, known)


def _mapping(node: yaml.Node, file: Path, name: str) -> dict[str, Any]:
    return {key: plain_value(value, file) for key, _, value in entries(node, file, name)}


def _put(section: dict[str, Any], flag: Flag) -> None:
    """Set a value at the flag's path of keys, and make the mappings on that path."""
    keys = flag.path.split(".")[1:]
    if not all(keys):
        raise ConfigError(f"{flag.name}: must read --Service.key=VALUE", param=flag.name)
    try:
        value = yaml.safe_load(flag.value)
    except yaml.YAMLError as exc:
        message = f"{flag.name}={flag.value}: not valid YAML"
        raise ConfigError(message, param=flag.name) from exc
    for key in keys[:-1]:
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{flag.name}: {key} is not a mapping", param=flag.name)
    section[keys[-1]] = value
