"""vLLM's scheduler and its block pool as a connector sees them, and ranks without a model.

The order of the calls is vLLM 0.32's: matched, allocated, orders; then the ranks' step; then the
news, and only afterwards are blocks freed. Writes of prefill workers land here as events, and each
one is checked: no request may hold the block by then, but the one for which it was written.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from types import SimpleNamespace
from typing import Any

from tandem.decode.config import DisaggConfig, Policy
from tandem.vllm.scheduler_side import PLACE, REPORT, TICKET, SchedulerSide
from tandem.vllm.step_messages import (
    Ends,
    LoadEnd,
    News,
    Offer,
    Orders,
    PrefillView,
    Progress,
    Released,
)

BLOCK_SIZE = 4
REMOTE = PrefillView(DisaggConfig(policy=Policy.ALWAYS_REMOTE), 1, True, 0)


@dataclass(slots=True, eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0


class Pool:
    """A pool that hands the block out first that was freed last, as vLLM's does."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks: Sequence[Block] = [Block(i) for i in range(num_blocks)]
        self.free: list[int] = list(range(num_blocks))

    def allocate(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block_id in taken:
            assert self.blocks[block_id].ref_cnt == 0
            self.blocks[block_id].ref_cnt = 1
        return taken

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.remove(block.block_id)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, "freed twice"
            if block.ref_cnt == 0:
                self.free.insert(0, block.block_id)


@dataclass(slots=True, eq=False)
class FakeRequest:
    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    status: str = "waiting"  # waiting, loading, running, finished
    block_ids: list[int] = field(default_factory=list)
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(prompt_logprobs=None))
    lora_request: Any = None
    mm_features: tuple[int, ...] = ()
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens

    @property
    def all_token_ids(self) -> list[int]:
        return list(range(self.num_prompt_tokens))


def for_ticket(key: str) -> dict[str, Any]:
    """The `kv_transfer_params` of a ticket's prompt."""
    return {TICKET: key}


def at(place: str) -> dict[str, Any]:
    """The `kv_transfer_params` of a request whose caller wants the place, and its report."""
    return {PLACE: place, REPORT: "mine"}


class FakeRank:
    """The offers of a rank that are open, its writes, and its ends."""

    def __init__(self) -> None:
        self.ends = Ends()
        self.offers: dict[str, Offer] = {}  # until they end
        self.writable: dict[str, Offer] = {}  # writes into these may still land

    def obey(self, orders: Orders) -> None:
        for offer in orders.offers:
            self.offers[offer.key] = self.writable[offer.key] = offer
        for key in orders.cancelled:
            if key in self.offers:
                self.give_up(key, failed=False, quarantined=True)

    def prove(self, key: str) -> None:
        """Every block of the offer is proven: nothing writes into it any more."""
        offer = self.offers.pop(key)
        del self.writable[key]
        self.ends.append(LoadEnd(offer.request_id, key))

    def give_up(self, key: str, *, failed: bool = True, quarantined: bool) -> None:
        offer = self.offers.pop(key)
        if not quarantined:
            del self.writable[key]
        reason = "deadline" if failed else None
        self.ends.append(LoadEnd(offer.request_id, key, reason, quarantined))

    def settle(self, key: str) -> None:
        """No write of an offer that was given up can land any more."""
        del self.writable[key]
        self.ends.append(Released(key))

    def read(self, key: str) -> None:
        """No write from the blocks of a ticket's prompt is under way."""
        self.ends.append(Released(key))


class FakeVllm:
    """A scheduler, its pool, and its ranks."""

    def __init__(self, num_blocks: int = 16, *, takes: bool = True, num_ranks: int = 1) -> None:
        self.now = 0.0
        self.pool = Pool(num_blocks)
        self.side = SchedulerSide(
            BLOCK_SIZE, num_ranks=num_ranks, offers=True, takes=takes, now=lambda: self.now
        )
        self.side.pool = self.pool
        self.ranks = [FakeRank() for _ in range(num_ranks)]
        self.rank = self.ranks[0]
        self.view = REMOTE
        self.num_unnamed: dict[str, int] = {}  # ranks that have not named a request, as vLLM counts
        self.failed: set[str] = set()
        self.requests: dict[str, FakeRequest] = {}  # those whose blocks are not freed
        self.progress: list[Progress] = []
        self.over: list[str] = []

    # ---- the frontend -------------------------------------------------------------------------

    def add(self, request: FakeRequest) -> FakeRequest:
        self.requests[request.request_id] = request
        return request

    def abort(self, request: FakeRequest) -> None:
        was_loading = request.status == "loading"
        request.status = "finished"
        self.side.finished(request)
        if not was_loading:
            self._free(request)

    def finish(self, request: FakeRequest) -> None:
        assert request.status == "running"
        self.abort(request)

    # ---- a step -------------------------------------------------------------------------------

    def step(self, num_cached: int = 0, chunk: int = 8) -> Orders:
        """Schedule, run the rank, and update from its output. `num_cached` tokens hit."""
        self.now += 0.01
        scheduled: dict[str, int] = {}
        for request in list(self.requests.values()):
            if request.status == "waiting":
                self._schedule(request, num_cached, chunk, scheduled)
            elif request.status == "running":
                num_left = request.num_prompt_tokens - request.num_computed_tokens
                if min(num_left, chunk) > 0:
                    scheduled[request.request_id] = min(num_left, chunk)
        orders = self.side.orders(scheduled, lambda each: self.requests[each].block_ids)
        for request_id, count in scheduled.items():
            self.requests[request_id].num_computed_tokens += count
        for rank in self.ranks:
            rank.obey(orders)
        self.progress += orders.progress
        self.over += orders.over
        self._update()
        return orders

    def _schedule(
        self, request: FakeRequest, num_cached: int, chunk: int, scheduled: dict[str, int]
    ) -> None:
        num_cached = min(num_cached, (request.num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE)
        num_loaded, is_async = self.side.matched(request, num_cached)
        if num_loaded is None:
            return
        num_blocks = -(-request.num_prompt_tokens // BLOCK_SIZE)
        if len(self.pool.free) < num_blocks:
            return
        assert not request.block_ids
        request.block_ids = self.pool.allocate(num_blocks)
        self.side.allocated(request, request.block_ids, num_loaded)
        request.num_computed_tokens = num_cached + num_loaded
        request.status = "loading" if is_async else "running"
        if not is_async:
            num_new = min(chunk, request.num_prompt_tokens - num_cached)
            scheduled[request.request_id] = num_new

    def _update(self) -> None:
        news = [News(self.view, {i: list(rank.ends)}) for i, rank in enumerate(self.ranks)]
        for rank in self.ranks:
            rank.ends.clear()
        self.side.take_news(reduce(News.aggregate, news))
        for end in [end for each in news for ends in each.ends.values() for end in ends]:
            if isinstance(end, Released):
                continue
            num_unnamed = self.num_unnamed.pop(end.request_id, len(self.ranks)) - 1
            if end.reason is not None:
                self.failed.add(end.request_id)
            if num_unnamed:
                self.num_unnamed[end.request_id] = num_unnamed
                continue
            has_failed = end.request_id in self.failed
            self.failed.discard(end.request_id)
            assert end.request_id in self.requests, "vLLM's own assertion"
            request = self.requests[end.request_id]
            if request.status == "finished":
                self._free(request)
            elif has_failed:
                request.status, request.num_computed_tokens = "waiting", 0
                self.pool.free_blocks([self.pool.blocks[i] for i in request.block_ids])
                request.block_ids = []
            else:
                request.status = "running"
        self.check()

    def _free(self, request: FakeRequest) -> None:
        self.pool.free_blocks([self.pool.blocks[i] for i in request.block_ids])
        del self.requests[request.request_id]

    # ---- what must hold -----------------------------------------------------------------------

    def check(self) -> None:
        """A block that a prefill worker may write belongs to its request, or is pinned."""
        writable = [each for rank in self.ranks for each in rank.writable.items()]
        for key, offer in writable:
            filled = offer.block_ids[offer.num_cached_blocks :]
            for request in self.requests.values():
                if request.request_id != offer.request_id or request.status == "running":
                    assert not set(filled) & set(request.block_ids), f"{key} would be overwritten"
            assert not set(filled) & set(self.pool.free), f"blocks of {key} are free"
        for block in self.pool.blocks:
            assert (block.ref_cnt == 0) == (block.block_id in self.pool.free)
