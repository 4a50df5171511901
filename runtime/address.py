"""Names of things in a cluster: ids, endpoints and the keys they live under."""

import os
import re
from dataclasses import dataclass
from urllib.parse import quote

from tandem.runtime.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_ENDPOINT_NAME = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")
_SCHEMES = ("tandem://", "dyn://")


def new_id() -> str:
    """Return a cluster-unique id: 16 hexadecimal characters, random."""
    return os.urandom(8).hex()


def host_port(host: str, port: int) -> str:
    """Return "host:port", with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class EndpointAddress:
    """`namespace.component.endpoint`; the endpoint's name may have parts, as "chat/completions".

    Raise ConfigError when a part is not a plain name.
    """

    namespace: str
    component: str
    endpoint: str

    def __post_init__(self) -> None:
        for kind, pattern, part in (
            ("namespace", _NAME, self.namespace),
            ("component", _NAME, self.component),
            ("endpoint", _ENDPOINT_NAME, self.endpoint),
        ):
            if not pattern.fullmatch(part):
                raise ConfigError(
                    f"{kind} {part!r} is not a name: letters, digits, '_' and '-' only", param=kind
                )

    @classmethod
    def parse(cls, text: str) -> "EndpointAddress":
        """Parse the text of an address, with or without a scheme, with '.' or '/' between parts."""
        path = text
        for scheme in _SCHEMES:
            path = path.removeprefix(scheme)
        parts = path.split("." if "." in path else "/", 2)
        if len(parts) != 3:
            raise ConfigError(f"{text!r} is not namespace.component.endpoint")
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.namespace}.{self.component}.{self.endpoint}"

    def key_prefix(self) -> str:
        """Return the discovery prefix of all instances of this endpoint."""
        endpoint = quote(self.endpoint, safe="")
        return f"/tandem/{self.namespace}/instances/{self.component}/{endpoint}/"

    def instance_key(self, instance_id: str) -> str:
        """Return the discovery key of one instance."""
        return self.key_prefix() + instance_id
