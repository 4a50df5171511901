"""What files and flags say about the services of a graph."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from tandem.runtime.errors import ConfigError
from tandem.runtime.names import did_you_mean

CONFIG_VARIABLE = "TANDEM_SERVICE_CONFIG"  # the file that `tandem run` hands to its processes
COMMON = "Common"
COMMON_KEYS = "common-configs"
SERVICE_ARGS = "ServiceArgs"


class ServiceConfig(Mapping[str, Mapping[str, Any]]):
    """Service |-> its section, as it was written.

    `settings` gives what a service's own code should see: its section with the keys of `Common`
    that it names in `common-configs`, without what is for the launcher.
    """

    _instance: ClassVar["ServiceConfig | None"] = None

    def __init__(self, sections: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._sections = dict(sections or {})

    @classmethod
    def get_instance(cls) -> "ServiceConfig":
        """That of this process, as `tandem run` handed it over; empty in any other process."""
        if ServiceConfig._instance is None:
            path = os.environ.get(CONFIG_VARIABLE)
            ServiceConfig._instance = ServiceConfig.read(Path(path)) if path else ServiceConfig()
        return ServiceConfig._instance

    @classmethod
    def read(cls, path: Path) -> "ServiceConfig":
        """What `write` wrote. Raises ConfigError."""
        try:
            return cls(json.loads(path.read_bytes()))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{CONFIG_VARIABLE}: cannot read {path}: {exc}") from exc

    def write(self, path: Path) -> None:
        """A file that only this user can read."""
        path.touch(mode=0o600)
        path.write_text(json.dumps(self._sections))

    def __getitem__(self, service: str) -> Mapping[str, Any]:
        return self._sections[service]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sections)

    def __len__(self) -> int:
        return len(self._sections)

    def settings(self, service: str) -> dict[str, Any]:
        """What a service was told, from its section and from `Common`; its own values win."""
        own = self._sections.get(service, {})
        common = self._sections.get(COMMON, {})
        shared = {key: common[key] for key in own.get(COMMON_KEYS, ()) if key in common}
        mine = {k: v for k, v in own.items() if k not in (COMMON_KEYS, SERVICE_ARGS)}
        return shared | mine

    def require(self, service: str, key: str) -> Any:
        """One value. Raises ConfigError when nobody gave it."""
        settings = self.settings(service)
        if key not in settings:
            raise ConfigError(f"{service}.{key} must be set: --{service}.{key}=VALUE", param=key)
        return settings[key]

    def as_args(self, service: str, prefix: str = "") -> list[str]:
        """A service's settings as `--key value` words for an argument parser.

        True is a flag alone and False is left out; lists give their items, mappings JSON. With a
        `prefix` only keys that begin with it are given, without it.
        """
        words: list[str] = []
        for key, value in self.settings(service).items():
            if not key.startswith(prefix) or value is False or value is None:
                continue
            words.append(f"--{key.removeprefix(prefix)}")
            if isinstance(value, Mapping):
                words.append(json.dumps(value))
            elif isinstance(value, list):
                words += [str(item) for item in value]
            elif value is not True:
                words.append(str(value))
        return words

    def check_common(self) -> None:
        """Raises ConfigError for a section that wants of `Common` what is not there."""
        common = self._sections.get(COMMON, {})
        for service, section in self._sections.items():
            wanted = section.get(COMMON_KEYS, [])
            if not isinstance(wanted, list):
                raise ConfigError(f"{service}.{COMMON_KEYS} must be a list of keys of {COMMON}")
            for key in wanted:
                if key not in common:
                    raise unknown_key(f"{service}.{COMMON_KEYS}", str(key), common)


def unknown_key(where: str, key: str, known: Iterable[str]) -> ConfigError:
    """The error that names the known key which `key` may have meant."""
    return ConfigError(f"{where}: unknown key {key!r}; {did_you_mean(key, known)}", param=key)
