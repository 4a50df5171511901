"""`dynamo_context`: the place of a running service in the cluster."""

from collections.abc import Mapping
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


class ServiceContext(dict[str, Any]):
    """The context of this process's service, filled before its `__init__`.

    `runtime`, `component`, `endpoints`, `namespace`, `instance_id`, `lease`; `config`: the
    service's settings, a dict or the model of `@service(settings=...)`; `graph`: the classes that
    run, or None for all. A missing key raises ConfigError; without a service all keys are missing.
    """

    def __missing__(self, key: str) -> Any:
        if not self:
            raise ConfigError(f"no service is running in this process, so there is no {key!r}")
        raise ConfigError(f"no {key!r} here; there are {', '.join(self)}")

    def fill(self, values: Mapping[str, Any]) -> None:
        """Replace all values; called when a service starts."""
        self.clear()
        self.update(values)


dynamo_context = ServiceContext()
tandem_context = dynamo_context
