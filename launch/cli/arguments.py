"""From a command's arguments to the effective config."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.runtime.errors import ConfigError

if TYPE_CHECKING:  # pydantic and the rooms' configs would slow `tandem --help`
    from tandem.launch.config.model import EffectiveConfig


def split_config_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(the rest, the words of `--section.key=value` and `--section.key value`)."""
    rest: list[str] = []
    flags: list[str] = []
    words = iter(arguments)
    for word in words:
        name, has_value, _ = word.partition("=")
        if not name.startswith("--") or "." not in name:
            rest.append(word)
        elif has_value:
            flags.append(word)
        else:
            value = next(words, None)
            if value is None or value.startswith("--"):
                raise ConfigError(f"{name} needs a value: {name}=VALUE", param=name)
            flags.append(f"{name}={value}")
    return rest, flags


@dataclass(slots=True)
class Session:
    """What one call of the command was told about the config."""

    flags: list[str]  # --section.key=value
    file: Path | None = None
    options: list[tuple[str, Any, str]] = field(default_factory=list)  # (key, value, option)

    def set(self, key: str, value: Any, option: str) -> None:
        """A named option that stands for a config key; None means that it was not given."""
        if value is not None:
            self.options.append((key, value, option))

    def load(self) -> "EffectiveConfig":
        """All sources together. Raises ConfigError."""
        from tandem.launch.config.model import load_config
        from tandem.launch.config.sources import Setting

        config = load_config(file=self.file, environment=os.environ, flags=self.flags)
        named = [Setting(key, value, option) for key, value, option in self.options]
        return config.with_settings(named) if named else config

    def load_for_cluster(self) -> "EffectiveConfig":
        """As `load`; where no address was given, those of the cluster that runs on this machine."""
        from tandem.launch.config.sources import from_cluster
        from tandem.runtime.local_clusters import the_running_cluster

        config = self.load()
        addresses = ("runtime.etcd_endpoints", "runtime.nats_url")
        if any(config.origin(key) != "default" for key in addresses):
            return config
        cluster = the_running_cluster()
        return config if cluster is None else config.with_defaults(from_cluster(cluster))
