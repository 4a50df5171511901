"""The description of a service, and the notation of its resources."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from tandem.runtime.address import EndpointAddress
from tandem.runtime.errors import ConfigError
from tandem.sdk.service.config import ServiceConfig, unknown_key

MEMORY_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{prefix}i": 1 << (10 * power) for power, prefix in enumerate("KMGT", start=1)
}
SPEC_ATTRIBUTE = "__tandem_service__"
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one instance; None is not limited."""

    num_cpus: float | None = None
    memory_bytes: int | None = None
    num_gpus: int = 0

    def updated(self, given: Mapping[str, Any], where: str) -> "Resources":
        """Return a copy with the values of `{"cpu": "10", "memory": "20Gi", "gpu": "1"}`.

        Keys may be left out. Raise ConfigError naming `where` and the key.
        """
        fields = {
            "cpu": ("num_cpus", parse_cpus),
            "memory": ("memory_bytes", parse_bytes),
            "gpu": ("num_gpus", parse_gpus),
        }
        changed: dict[str, Any] = {}
        for key, value in given.items():
            if key not in fields:
                raise unknown_key(where, key, fields)
            field, parse = fields[key]
            changed[field] = parse(value, f"{where}.{key}")
        return replace(self, **changed)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A service, as its decorators describe it."""

    cls: type
    name: str  # of its component: the class's name
    namespace: str | None  # None: the cluster's
    is_enabled: bool
    component_type: str | None
    resources: Resources
    num_workers: int
    settings_model: type[BaseModel] | None  # its settings are checked against this
    endpoints: Mapping[str, str]  # endpoint |-> method
    dependencies: Mapping[str, type]  # attribute |-> the service it calls
    hooks: Mapping[str, tuple[str, ...]]  # kind |-> methods

    def address(self, endpoint: str, cluster: str) -> EndpointAddress:
        """Return the address of an endpoint in a cluster."""
        return EndpointAddress(self.namespace or cluster, self.name, endpoint)


def spec_of(cls: type) -> ServiceSpec:
    """Return the spec of `@service`. Raise ConfigError for a class without it."""
    spec = vars(cls).get(SPEC_ATTRIBUTE) if isinstance(cls, type) else None
    if not isinstance(spec, ServiceSpec):
        raise ConfigError(
            f"{getattr(cls, '__name__', cls)} is not a service: decorate it with @service"
        )
    return spec


def settings_of(spec: ServiceSpec, config: ServiceConfig) -> Any:
    """Return a service's settings: a dict, or its settings model; keys may have "-" for "_".

    Raise ConfigError naming an unknown key, or one with a wrong value.
    """
    settings, model = config.settings(spec.name), spec.settings_model
    if model is None:
        return settings
    known = model.model_fields
    named = {k if k in known else k.replace("-", "_"): v for k, v in settings.items()}
    for key in named:
        if key not in known and model.model_config.get("extra") != "allow":
            raise unknown_key(spec.name, key, known)
    try:
        return model.model_validate(named)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in (spec.name, *first["loc"]))
        raise ConfigError(f"{key}: {first['msg']}", param=key) from error


# ---- quantities -------------------------------------------------------------------------------


def parse_cpus(value: Any, where: str) -> float:
    """Return the cores of `10`, `"0.5"` or `"500m"`. Raise ConfigError."""
    match = _QUANTITY.fullmatch(str(value).strip())
    if isinstance(value, bool) or match is None or match[2] not in ("", "m"):
        raise ConfigError(f'{where} = {value!r}: must be a number of cores, as in "10" or "500m"')
    num_cpus = float(match[1]) / (1000 if match[2] else 1)
    if num_cpus <= 0:
        raise ConfigError(f"{where} = {value!r}: must be more than 0")
    return num_cpus


def parse_bytes(value: Any, where: str) -> int:
    """Return the bytes of `"20Gi"`, `"500M"` or a number. Raise ConfigError."""
    match = _QUANTITY.fullmatch(str(value).strip())
    if isinstance(value, bool) or match is None or match[2] not in MEMORY_UNITS:
        units = ", ".join(unit for unit in MEMORY_UNITS if unit)
        raise ConfigError(f'{where} = {value!r}: must be bytes, as in "20Gi"; units are {units}')
    return int(float(match[1]) * MEMORY_UNITS[match[2]])


def parse_gpus(value: Any, where: str) -> int:
    """Return a whole number of GPUs. Raise ConfigError."""
    text = str(value).strip()
    if isinstance(value, bool) or not text.isdecimal():
        raise ConfigError(f'{where} = {value!r}: must be a whole number of GPUs, as in "1"')
    return int(text)


def parse_workers(value: Any, where: str) -> int:
    """Return a number of instances. Raise ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where} = {value!r}: must be a whole number of at least 1")
    return value
