"""Values of a config file that a running cluster of this machine does not use."""

import json
from dataclasses import replace
from pathlib import Path

from tandem.launch.config.model import EffectiveConfig, find_field, is_secret, load_config
from tandem.runtime.local_clusters import running_clusters

ROLE_FILES = "*-[0-9]*.yaml"  # the config of every role, written when it is started


def mark_not_in_force(effective: EffectiveConfig, file: Path) -> EffectiveConfig:
    """Return the config with a mark at every value of `file` that no role was started with."""
    etcd_endpoints = effective.config.runtime.etcd_endpoints
    roles = [
        load_config(file=path)
        for cluster in running_clusters()
        if cluster.etcd_endpoints == etcd_endpoints
        for path in sorted(Path(cluster.run_dir).glob(ROLE_FILES))
    ]
    settings = dict(effective.settings)
    for key, setting in effective.settings.items():
        if not setting.origin.startswith(f"{file}:") or is_secret(find_field(setting)):
            continue
        used = [role.value(key) for role in roles]
        if used and effective.value(key) not in used:
            shown = json.dumps(used[0])
            origin = f"{setting.origin}, not in force: the cluster was started with {shown}"
            settings[key] = replace(setting, origin=origin)
    return replace(effective, settings=settings)
