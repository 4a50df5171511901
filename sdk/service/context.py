"""`dynamo_context`: what a running service knows of its place in the cluster."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease that this process's records in etcd hang on."""

    instance_id: str

    def id(self) -> str:
        """The instance id, which names the process wherever a lease's id did."""
        return self.instance_id


class ServiceContext(Mapping[str, Any]):
    """The service of this process, from before its `__init__` on.

    `runtime`, `component`, `endpoints`, `namespace`, `instance_id`, `lease`; `config`: what the
    service was told, as a dict or as the model of `@service(settings=...)`; `graph`: the classes
    that run, or None for all. Raises ConfigError for what is not there, which is everything where
    no service runs.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key in self._values:
            return self._values[key]
        if not self._values:
            raise ConfigError(f"no service runs in this process, so there is no {key!r}")
        raise ConfigError(f"no {key!r} here; there are {', '.join(self._values)}")

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def fill(self, values: Mapping[str, Any]) -> None:
        """Takes the place of what was there; for whoever starts a service."""
        self._values = dict(values)


dynamo_context = ServiceContext()
tandem_context = dynamo_context
