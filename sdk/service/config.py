"""The settings of a graph's services, from files and flags."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from tandem.runtime.errors import ConfigError
from tandem.runtime.local.private_file import write_private
from tandem.runtime.process.names import did_you_mean

CONFIG_VARIABLE = "TANDEM_SERVICE_CONFIG"  # the file for the processes of `tandem run`
COMMON = "Common"
COMMON_KEYS = "common-configs"
SERVICE_ARGS = "ServiceArgs"


class ServiceConfig(dict[str, Mapping[str, Any]]):
    """Service |-> its section, as it was written.

    `settings` returns the section for the service's own code: with the keys of `Common` that it
    lists in `common-configs`, and without those of the launcher.
    """

    _instance: ClassVar["ServiceConfig | None"] = None

    @classmethod
    def get_instance(cls) -> "ServiceConfig":
        """Return the config of this process, from `tandem run`; empty in any other process."""
        if ServiceConfig._instance is None:
            path = os.environ.get(CONFIG_VARIABLE)
            ServiceConfig._instance = ServiceConfig.read(Path(path)) if path else ServiceConfig()
        return ServiceConfig._instance

    @classmethod
    def read(cls, path: Path) -> "ServiceConfig":
        """Read a file of `write`. Raise ConfigError."""
        try:
            return cls(json.loads(path.read_bytes()))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{CONFIG_VARIABLE}: cannot read {path}: {exc}") from exc

    def write(self, path: Path) -> None:
        """Write a file that only this user can read."""
        write_private(path, json.dumps(self))

    def settings(self, service: str) -> dict[str, Any]:
        """Return a service's values, from its section and from `Common`; its own win."""
        own, common = self.get(service, {}), self.get(COMMON, {})
        shared = {key: common[key] for key in own.get(COMMON_KEYS, ()) if key in common}
        mine = {k: v for k, v in own.items() if k not in (COMMON_KEYS, SERVICE_ARGS)}
        return shared | mine

    def require(self, service: str, key: str) -> Any:
        """Return one value. Raise ConfigError if it is not set."""
        settings = self.settings(service)
        if key not in settings:
            raise ConfigError(f"{service}.{key} must be set: --{service}.{key}=VALUE", param=key)
        return settings[key]

    def as_args(self, service: str, prefix: str = "") -> list[str]:
        """Return a service's settings as `--key value` words for an argument parser.

        True is a flag without a value, and False is left out. A list becomes its items, a mapping
        JSON. With a `prefix`, only keys that begin with it are returned, without it.
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
        """Raise ConfigError for a section that lists a key which `Common` does not have."""
        common = self.get(COMMON, {})
        for service, section in self.items():
            wanted = section.get(COMMON_KEYS, [])
            if not isinstance(wanted, list):
                raise ConfigError(f"{service}.{COMMON_KEYS} must be a list of keys of {COMMON}")
            for key in wanted:
                if key not in common:
                    raise unknown_key(f"{service}.{COMMON_KEYS}", str(key), common)


def unknown_key(where: str, key: str, known: Iterable[str]) -> ConfigError:
    """Return an error with the known key nearest to `key`."""
    return ConfigError(f"{where}: unknown key {key!r}; {did_you_mean(key, known)}", param=key)
