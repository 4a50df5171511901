"""The connector in vLLM's scheduler: local or remote, tickets, and blocks that must not be reused.

Pure, without vLLM. Blocks in which writes may still land, or from which they may still read, are
pinned by a reference of their own, so whatever vLLM does with the request frees them later. A rank
has its part of each block, and moves it by itself: the last one that ends frees the block.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.decode.admission import PrefillSide, decide, given_up
from tandem.decode.config import Policy
from tandem.decode.decision import Decision, PlacementCause
from tandem.runtime.wire.block_hash import num_blocks_of
from tandem.runtime.wire.bounds import MAX_TEXT
from tandem.runtime.wire.messages import PrefillPlace, PrefillReport
from tandem.vllm.step_messages import LoadEnd, News, Offer, Orders, PrefillView, Progress

TICKET = "tandem_ticket"  # in the `kv_transfer_params` of a prompt that is computed for a ticket
PLACE = "tandem_prefill"  # local or remote, in those of any other request
REPORT = "tandem_report"  # in these, too: the name under which the place is reported
MAX_NEWS_AGE_S = 0.5


class Request(Protocol):
    """vLLM's request."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    all_token_ids: Sequence[int]
    cache_salt: str | None
    kv_transfer_params: dict[str, Any] | None
    mm_features: Sequence[Any]  # of images and the like


class BlockPool(Protocol):
    """The part of vLLM's block pool that counts references."""

    blocks: Sequence[Any]  # by block id

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...


@dataclass(slots=True)
class _Load:
    offer: Offer
    request: Request
    ranks: set[int]  # whose parts have not ended
    is_given_up: bool = False


class SchedulerSide:
    """Answers the scheduler's calls.

    With `offers`, prompts may go to prefill workers. With `takes`, requests with a ticket's key
    are prompts of other workers; elsewhere a key has no meaning, since callers can make one up.
    """

    def __init__(
        self,
        block_size: int,
        *,
        num_ranks: int = 1,
        offers: bool,
        takes: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool: BlockPool  # bind_gpu_block_pool() sets it
        self._block_size = block_size
        self._ranks = frozenset(range(num_ranks))
        self._offers = offers
        self._takes = takes
        self._now = now
        self._view: PrefillView | None = None
        self._view_at = 0.0
        self._asked_at: dict[str, float] = {}  # requests that wait for news
        self._decided: set[str] = set()  # requests that are not offered, or not again
        self._loads: dict[str, _Load] = {}  # by request id
        self._sources: dict[str, tuple[str, Request]] = {}  # by request id: those of tickets
        self._pinned: dict[str, list[int]] = {}  # by key
        self._users: dict[str, set[int]] = {}  # by key: the ranks that may use pinned blocks
        self._orders = Orders()
        self._reports: dict[str, PrefillReport] = {}

    @property
    def is_busy(self) -> bool:
        """Blocks are pinned: the engine must go on with its steps to have them released."""
        return bool(self._pinned)

    # ---- requests -----------------------------------------------------------------------------

    def matched(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens to load, and True for a load beside the steps.

        None: decided at one of the next steps, because the view of the prefill workers is old.
        """
        num_wanted = request.num_prompt_tokens - 1 - num_computed_tokens
        if not self._may_offer(request):
            if request.mm_features and request.request_id not in self._decided:
                report = PrefillReport("local", "the prompt has images", num_computed_tokens)
                self._note(request, report)
            self._decided.add(request.request_id)
            return 0, False
        if num_wanted < 1:  # the last token is computed here in any case
            decision = Decision("local", PlacementCause.SHORT, num_uncached=1, limit=1)
        else:
            asked_at = self._asked_at.setdefault(request.request_id, self._now())
            view = self._view
            if view is None or self._view_at < asked_at - MAX_NEWS_AGE_S:
                return None, False
            decision = self._decide(view, request, num_wanted, num_computed_tokens)
        self._report(request, decision, num_computed_tokens)
        if decision.place == "local":
            self._decided.add(request.request_id)
            return 0, False
        return num_wanted, True

    def _report(self, request: Request, decision: Decision, num_cached: int) -> None:
        reason = decision.reason[:MAX_TEXT]
        report = PrefillReport(decision.place, reason, num_cached, cause=decision.cause)
        self._note(request, report)

    def _note(self, request: Request, report: PrefillReport) -> None:
        """Note the place of a prompt for the caller who has named its report."""
        name = (request.kv_transfer_params or {}).get(REPORT)
        if isinstance(name, str):
            self._reports[name] = report

    def take_reports(self) -> dict[str, PrefillReport]:
        """Return the places that were decided or changed since the last call."""
        reports, self._reports = self._reports, {}
        return reports

    def _may_offer(self, request: Request) -> bool:
        if not self._offers or request.request_id in self._decided or self._key_of(request):
            return False
        return request.num_tokens == request.num_prompt_tokens and _is_plain(request)

    def _decide(
        self, view: PrefillView, request: Request, num_uncached: int, num_cached: int
    ) -> Decision:
        thresholds = view.thresholds
        if thresholds.policy is Policy.ADAPTIVE:  # vLLM reports no step costs to predict from
            thresholds = thresholds.model_copy(update={"policy": Policy.THRESHOLD})
        is_too_long = 0 < view.max_prompt_tokens < num_cached + num_uncached
        side = PrefillSide(
            num_instances=0 if is_too_long else view.num_instances,
            queue_connected=view.queue_connected,
            num_queued_jobs=view.num_queued_jobs + len(self._orders.offers),
        )
        given = (request.kv_transfer_params or {}).get(PLACE)
        placement: PrefillPlace | None = given if given in ("local", "remote") else None
        return decide(
            thresholds, num_uncached, side, num_cached_tokens=num_cached, placement=placement
        )

    def allocated(self, request: Request, block_ids: Sequence[int], num_loaded: int) -> None:
        """Offer the prompt to the prefill workers if any of it is to be loaded."""
        request_id = request.request_id
        if (key := self._key_of(request)) is not None:
            if request_id not in self._sources:
                self._orders.begun.append(key)
            self._sources[request_id] = key, request
        if not num_loaded:
            return
        num_tokens = request.num_prompt_tokens - 1
        num_cached_blocks, rest = divmod(num_tokens - num_loaded, self._block_size)
        assert not rest, "a load begins with a block"
        offer = Offer(
            key=secrets.token_hex(16),
            request_id=request_id,
            token_ids=list(request.all_token_ids[:num_tokens]),
            cache_salt=request.cache_salt or "",
            num_cached_blocks=num_cached_blocks,
            block_ids=list(block_ids[: num_blocks_of(num_tokens, self._block_size)]),
        )
        self._decided.add(request_id)
        self._loads[request_id] = _Load(offer, request, set(self._ranks))
        self._orders.offers.append(offer)

    def finished(self, request: Request) -> None:
        """Handle the end of a request, in any state."""
        request_id = request.request_id
        self._decided.discard(request_id)
        self._asked_at.pop(request_id, None)
        if request_id in self._sources:
            key, _ = self._sources.pop(request_id)
            self._orders.over.append(key)
        if request_id in self._loads:
            self._orders.cancelled.append(self._loads[request_id].offer.key)

    def _key_of(self, request: Request) -> str | None:
        """Return the key of the ticket for which a prompt is computed; None without a ticket."""
        key = (request.kv_transfer_params or {}).get(TICKET)
        return key if self._takes and isinstance(key, str) else None

    # ---- steps --------------------------------------------------------------------------------

    def orders(
        self, num_scheduled_tokens: dict[str, int], table_of: Callable[[str], Sequence[int]]
    ) -> Orders:
        """Return the orders that go with a step. `table_of` returns a request's blocks."""
        orders, self._orders = self._orders, Orders()
        for request_id, (key, request) in self._sources.items():
            if (num_new := num_scheduled_tokens.get(request_id)) is None:
                continue
            block_ids = list(table_of(request_id))
            self._pin(key, block_ids, self._ranks)
            num_tokens = request.num_computed_tokens + num_new
            orders.progress.append(Progress(key, num_tokens, block_ids))
        return orders

    def take_news(self, news: News | None) -> None:
        """Take a step's news, before vLLM frees any block of the requests whose loads ended."""
        if news is None:  # the ranks have left
            return
        self._view, self._view_at = news.view, self._now()
        for rank, ends in news.ends.items():
            for end in ends:
                if isinstance(end, LoadEnd):
                    self._load_ended(end, rank)
                else:
                    self._release(end.key, rank)

    def _load_ended(self, end: LoadEnd, rank: int) -> None:
        """Handle the end of a rank's part. vLLM gets the request back after the last one's."""
        load = self._loads[end.request_id]
        load.ranks.remove(rank)
        if not load.ranks:
            del self._loads[end.request_id]
        if end.quarantined:
            self._pin(end.key, load.offer.block_ids[load.offer.num_cached_blocks :], {rank})
        if end.reason is not None and not load.is_given_up:
            load.is_given_up = True
            if load.ranks:
                self._orders.cancelled.append(end.key)
            fallback = given_up(end.reason)
            self._report(load.request, fallback, 0)

    # ---- blocks -------------------------------------------------------------------------------

    def _pin(self, key: str, block_ids: Sequence[int], ranks: Iterable[int]) -> None:
        pinned = self._pinned.setdefault(key, [])
        fresh = sorted(set(block_ids).difference(pinned))
        self.pool.touch([self.pool.blocks[block_id] for block_id in fresh])
        pinned += fresh
        self._users.setdefault(key, set()).update(ranks)

    def _release(self, key: str, rank: int) -> None:
        """Free the pinned blocks once none of the ranks uses them."""
        if (users := self._users.get(key)) is None:
            return
        users.discard(rank)
        if not users:
            del self._users[key]
            pinned = self._pinned.pop(key)
            self.pool.free_blocks([self.pool.blocks[block_id] for block_id in reversed(pinned)])


def _is_plain(request: Any) -> bool:
    """Return True for a prompt whose KV follows from its tokens and its salt alone."""
    sampling = request.sampling_params
    return (
        sampling is not None
        and sampling.prompt_logprobs is None
        and request.lora_request is None
        and not request.mm_features
        and request.prompt_embeds is None
        and not request.skip_reading_prefix_cache
    )
