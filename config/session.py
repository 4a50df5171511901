"""From the options of one call of the command to the effective config."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.config.flags import Flag
from tandem.runtime.clock import set_pace

if TYPE_CHECKING:  # pydantic and the rooms' configs would slow `tandem --help`
    from tandem.config.model import EffectiveConfig


@dataclass(slots=True)
class Session:
    """The config file, flags and options of one call of the command."""

    flags: list[Flag]
    file: Path | None = None
    options: list[tuple[str, Any, str]] = field(default_factory=list)  # (key, value, option)

    def set(self, key: str, value: Any, option: str) -> None:
        """Record a named option that stands for a config key; None means that it was not given."""
        if value is not None:
            self.options.append((key, value, option))

    def load(self) -> "EffectiveConfig":
        """Return the config of all sources together, and set its pace. Raise ConfigError.

        An etcd that `tandem serve` runs on this machine stands for its whole cluster.
        """
        from tandem.config.model import load_config
        from tandem.config.sources import Setting, from_cluster
        from tandem.runtime.local.local_clusters import running_cluster_at

        config = load_config(file=self.file, environment=os.environ, flags=self.flags)
        named = [Setting(key, value, option) for key, value, option in self.options]
        config = config.with_settings(named) if named else config
        if config.origin("runtime.pace") != "default":
            set_pace(config.config.runtime.pace)
        if config.origin("runtime.etcd_endpoints") == "default":
            return config
        runtime = config.config.runtime
        is_named = config.origin("runtime.namespace") != "default"
        cluster = running_cluster_at(
            runtime.etcd_endpoints, runtime.namespace if is_named else None
        )
        return config if cluster is None else config.with_defaults(from_cluster(cluster))

    def load_for_cluster(self) -> "EffectiveConfig":
        """Return `load()`, joined to the cluster of this machine where no address was given."""
        from tandem.config.sources import from_cluster
        from tandem.runtime.local.local_clusters import the_running_cluster

        config = self.load()
        addresses = ("runtime.etcd_endpoints", "runtime.nats_url")
        if any(config.origin(key) != "default" for key in addresses):
            return config
        is_named = config.origin("runtime.namespace") != "default"
        cluster = the_running_cluster(config.config.runtime.namespace if is_named else None)
        return config if cluster is None else config.with_defaults(from_cluster(cluster))
