"""Names of things in a cluster: ids, endpoints and the keys they live under."""

import re
import secrets
from dataclasses import dataclass

from tandem.runtime.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_-]+")


def new_id() -> str:
    """A cluster-unique id: 16 hexadecimal characters, random."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class EndpointAddress:
    """`namespace.component.endpoint`. Raises ConfigError when a part is not a plain name."""

    namespace: str
    component: str
    endpoint: str

    def __post_init__(self) -> None:
        for part in (self.namespace, self.component, self.endpoint):
            if not _NAME.fullmatch(part):
                raise ConfigError(f"{part!r} is not a name: letters, digits, '_' and '-' only")

    @classmethod
    def parse(cls, text: str) -> "EndpointAddress":
        """The address that `str()` wrote."""
        parts = text.split(".")
        if len(parts) != 3:
            raise ConfigError(f"{text!r} is not namespace.component.endpoint")
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.namespace}.{self.component}.{self.endpoint}"

    def key_prefix(self) -> str:
        """The discovery prefix of all instances of this endpoint."""
        return f"/tandem/{self.namespace}/instances/{self.component}/{self.endpoint}/"

    def instance_key(self, instance_id: str) -> str:
        """The discovery key of one instance."""
        return self.key_prefix() + instance_id
