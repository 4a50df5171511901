"""The choice of an instance for a prompt, as a policy makes it. Pure."""

import random
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from tandem.router.config import RouterConfig
from tandem.router.kv_index import KvIndex
from tandem.router.load_table import Flags, LoadTable
from tandem.router.predict import Floats
from tandem.runtime.wire.messages import MAX_ROUTED, Routed


class RoutingDecision(Struct, frozen=True, gc=False):
    """The instance for a request, and the reason."""

    instance_id: str
    num_overlap_blocks: int
    reason: str
    predicted_ms: float = 0.0  # to the first token; 0: not known
    cost_ms: float = 0.0  # predicted delay of all answers together
    compared: "Compared | Routed | None" = None  # None: nothing was predicted

    @property
    def routed(self) -> Routed | None:
        """The instances that were compared, for the request; None: nothing was predicted."""
        return self.compared.routed() if isinstance(self.compared, Compared) else self.compared


class Compared(Struct, frozen=True, gc=False, eq=False):
    """The instances that were compared, as arrays in one order; kept as they are until asked."""

    instance_ids: list[str]
    first_token_s: Floats
    costs_s: Floats
    fit: Flags

    def routed(self) -> Routed:
        """Return them for a request; of more than MAX_ROUTED the cheapest."""
        instance_ids = self.instance_ids
        columns: tuple[Floats, ...] = (self.first_token_s, self.costs_s, self.fit.astype(float))
        if len(instance_ids) > MAX_ROUTED:
            cheapest = self.costs_s.argsort(kind="stable")[:MAX_ROUTED]
            instance_ids = [instance_ids[at] for at in cheapest]
            columns = tuple(column[cheapest] for column in columns)
        return Routed(instance_ids, *(column.tolist() for column in columns))


class Known(Protocol):
    """The state of a router, which a policy chooses by."""

    config: RouterConfig
    index: KvIndex
    rng: random.Random

    @property
    def clock(self) -> Callable[[], float]:
        """The seconds now."""

    @property
    def loads(self) -> LoadTable:
        """The loads of all instances."""


class Scorer(Protocol):
    """A policy: a file of its own, and a line in `policy.POLICIES`."""

    def heeds_prefix(self, candidates: list[str]) -> bool:
        """Return True if the hashes of a prompt can make a difference to `choose`."""

    def choose(
        self,
        candidates: list[str],
        hashes: list[bytes],
        num_blocks: int,
        ttft_target_s: float | None,
        named: str,
    ) -> RoutingDecision:
        """Return the instance for a prompt, as `Router.choose` does."""
