"""The values for services in a YAML file and in `--Class.key=value` flags."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tandem.launch.config.sources import entries, is_empty, plain_value, read_yaml
from tandem.runtime.errors import ConfigError
from tandem.sdk.service.config import COMMON, SERVICE_ARGS, ServiceConfig, unknown_key
from tandem.sdk.service.spec import Resources, ServiceSpec, parse_workers

ARGS_KEYS = ("workers", "resources")


@dataclass(frozen=True, slots=True)
class ServiceNeeds:
    """How many instances of a service to start, and what each of them needs."""

    num_workers: int
    resources: Resources


def read_services(
    file: Path | None, flags: Iterable[str], known: Sequence[ServiceSpec]
) -> ServiceConfig:
    """Both together; flags win. Raises ConfigError naming file and line, or the flag."""
    names = [COMMON, *(spec.name for spec in known)]
    sections: dict[str, dict[str, Any]] = {}
    if file is not None:
        for name, line, node in entries(read_yaml(file), file, "the file"):
            _check_name(name, f"{file}:{line}", names)
            values = {} if is_empty(node) else _mapping(node, file, name)
            sections[name] = values
    for flag in flags:
        name, _, text = flag.partition("=")
        path = name.removeprefix("--").split(".")
        _check_name(path[0], f"flag {name}", names)
        _put(sections.setdefault(path[0], {}), path[1:], _parsed(name, text), name)
    config = ServiceConfig(sections)
    config.check_common()
    return config


def needs_of(spec: ServiceSpec, config: ServiceConfig) -> ServiceNeeds:
    """What `ServiceArgs` says over what the decorator said. Raises ConfigError."""
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


def _parsed(flag: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ConfigError(f"{flag}={text}: not valid YAML", param=flag) from exc


def _put(section: dict[str, Any], path: Sequence[str], value: Any, flag: str) -> None:
    """Sets a value at a path of keys, making the mappings on its way."""
    if not all(path):
        raise ConfigError(f"{flag}: must read --Service.key=VALUE", param=flag)
    for key in path[:-1]:
        inner = section.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{flag}: {key} is not a mapping", param=flag)
        section = inner
    section[path[-1]] = value
