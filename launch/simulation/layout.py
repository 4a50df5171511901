"""The layouts of a number of workers, and the topology file of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from tandem.config.topology import KEYS_OF_ROLES
from tandem.decode.config import DisaggConfig, Policy
from tandem.router.config import RouterConfig
from tandem.runtime.wire.cluster_messages import WorkerRole


@dataclass(frozen=True, slots=True)
class Layout:
    """The roles of some workers; `policy` replaces the config's where it is given.

    With `in_turn` the decode workers get requests in turn, whatever their load.
    """

    name: str
    roles: tuple[WorkerRole, ...]
    policy: Policy | None = None
    in_turn: bool = False

    def config(self, disagg: DisaggConfig) -> DisaggConfig:
        """Return the config of its decode workers."""
        return disagg if self.policy is None else disagg.model_copy(update={"policy": self.policy})

    def router(self, router: RouterConfig) -> RouterConfig:
        """Return the config of the router before its decode workers."""
        return router.model_copy(update={"policy": "round_robin"}) if self.in_turn else router

    def topology(self, settings: Mapping[str, Any]) -> str:
        """Return the file that `tandem serve --topology` takes; `settings` are for every role."""
        if self.policy is not None:
            settings = {**settings, "disagg.policy": self.policy.value}
        roles: dict[str, dict[str, int]] = {"frontend": {"count": 1}}
        for role in dict.fromkeys(self.roles):
            roles[KEYS_OF_ROLES[role]] = {"count": self.roles.count(role)}
        file: dict[str, Any] = {"description": f"{self.name}, by tandem plan", "roles": roles}
        if settings:
            file["config"] = dict(settings)
        return yaml.safe_dump(file, sort_keys=False)


def layouts_of(num_workers: int) -> list[Layout]:
    """Return the layouts of `num_workers` alike workers: unsplit, every fixed split, both roles."""
    splits = [
        Layout(
            f"{num_prefill}P {num_workers - num_prefill}D",
            _times("prefill", num_prefill) + _times("decode", num_workers - num_prefill),
        )
        for num_prefill in range(1, num_workers)
    ]
    unsplit = Layout("unsplit", _times("decode", num_workers), Policy.ALWAYS_LOCAL)
    return [unsplit, *splits, Layout("workers", _times("both", num_workers))]


def _times(role: WorkerRole, count: int) -> tuple[WorkerRole, ...]:
    return (role,) * count
