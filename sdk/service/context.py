"""`dynamo_context`: the place of a running service in the cluster."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of this process's records in etcd."""

    instance_id: str

    def id(self) -> str:
        """Return the instance id, which takes the place of a lease's id."""
        return self.instance_id


class ServiceContext(Mapping[str, Any]):
    """The context of this process's service, filled before its `__init__`.

    `runtime`, `component`, `endpoints`, `namespace`, `instance_id`, `lease`; `config`: the
    service's settings, a dict or the model of `@service(settings=...)`; `graph`: the classes that
    run, or None for all. A missing key raises ConfigError; without a service all keys are missing.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key in self._values:
            return self._values[key]
        if not self._values:
            raise ConfigError(f"no service is running in this process, so there is no {key!r}")
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
        """Replace all values; called when a service starts."""
        self._values = dict(values)


dynamo_context = ServiceContext()
tandem_context = dynamo_context
