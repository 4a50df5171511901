"""The connector in vLLM's scheduler: decisions, tickets and pins, against a fake of its calls."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.decode.config import DisaggConfig, Policy
from tandem.vllm.scheduler_side import MAX_NEWS_AGE_S
from tandem.vllm.step_messages import News, PrefillView, Released
from tests.vllm.fake_scheduler import BLOCK_SIZE, REMOTE, FakeRequest, FakeVllm, at, for_ticket


def with_news(num_blocks: int = 16, num_ranks: int = 1) -> FakeVllm:
    vllm = FakeVllm(num_blocks, num_ranks=num_ranks)
    vllm.step()
    return vllm


def offered(vllm: FakeVllm, num_tokens: int = 10, num_cached: int = 0) -> tuple[FakeRequest, str]:
    """A request that is offered, and the key of its offer."""
    request = vllm.add(FakeRequest(f"r{len(vllm.requests)}", num_tokens))
    orders = vllm.step(num_cached)
    (offer,) = orders.offers
    return request, offer.key


def test_a_prompt_is_offered_but_for_its_last_token() -> None:
    vllm = with_news()
    request = vllm.add(FakeRequest("r", 9))
    (offer,) = vllm.step().offers
    assert offer.token_ids == list(range(8)) and offer.block_ids == request.block_ids[:2]
    vllm.rank.prove(offer.key)
    vllm.step()
    assert request.status == "running" and request.num_computed_tokens == 8
    assert not vllm.side.is_busy


def test_without_news_the_scheduler_asks_again_and_never_for_ever() -> None:
    vllm = FakeVllm()
    request = FakeRequest("r", 10)
    assert vllm.side.matched(request, 0) == (None, False)
    vllm.step()
    vllm.now += 2 * MAX_NEWS_AGE_S
    old = FakeRequest("old", 10)
    assert vllm.side.matched(old, 0) == (None, False), "the view is older than the request"
    vllm.step()
    vllm.now += 2 * MAX_NEWS_AGE_S
    assert vllm.side.matched(old, 0) == (9, True), "one step's news after the request is enough"


def test_the_policy_and_the_requests_own_placement_decide() -> None:
    def place(view: PrefillView, asked: str | None = None, num_tokens: int = 40) -> str:
        vllm = FakeVllm()
        vllm.view = view
        vllm.step()
        request = FakeRequest("r", num_tokens, at(asked) if asked else None)
        return "remote" if vllm.side.matched(request, 0)[1] else "local"

    adaptive = PrefillView(DisaggConfig(max_local_prefill_length=30), 1, True, 0)
    assert place(adaptive) == "remote" and place(adaptive, num_tokens=31) == "local"
    assert place(adaptive, "elsewhere", 5) == "local", "no place at all"
    assert place(adaptive, "local") == "local" and place(adaptive, "remote", 5) == "remote"
    full = PrefillView(DisaggConfig(max_local_prefill_length=30), 1, True, 2)
    assert place(full) == "local"
    assert place(PrefillView(DisaggConfig(policy=Policy.ALWAYS_REMOTE), 0, True, 0)) == "local"
    assert place(PrefillView(DisaggConfig(policy=Policy.ALWAYS_REMOTE), 1, False, 0)) == "local"
    for most, expected in ((0, "remote"), (39, "remote"), (38, "local")):
        view = PrefillView(DisaggConfig(policy=Policy.ALWAYS_REMOTE), 1, True, 0, most)
        assert place(view) == expected, most


def test_the_place_of_a_prompt_is_reported_with_its_reason_and_again_when_it_changes() -> None:
    def reports(vllm: FakeVllm) -> list[tuple[str, str, int]]:
        found = vllm.side.take_reports()
        assert found.keys() <= {"mine"}
        return [(each.place, each.reason, each.num_cached_tokens) for each in found.values()]

    vllm = with_news()
    vllm.add(FakeRequest("unnamed", 10))
    vllm.add(FakeRequest("r", 10, at("remote")))
    vllm.step(num_cached=BLOCK_SIZE)
    assert reports(vllm) == [("remote", "asked for by the request", BLOCK_SIZE)]
    for key in list(vllm.rank.offers):
        vllm.rank.give_up(key, quarantined=False)
    vllm.step()
    assert reports(vllm) == [("local", "remote failed: deadline", 0)]
    vllm.step()
    assert not reports(vllm), "the request that is asked again keeps its cause"
    vllm.add(FakeRequest("cached", 9, at("remote")))
    vllm.step(num_cached=2 * BLOCK_SIZE)
    assert reports(vllm) == [("local", "uncached 1 <= max_local_prefill_length 1", 8)]
    vllm.side.matched(FakeRequest("here", 10, at("local")), 0)
    assert reports(vllm) == [("local", "asked for by the request", 0)]


def test_prompts_whose_kv_is_not_that_of_their_tokens_stay_local() -> None:
    vllm = with_news()
    for change in (
        {"lora_request": object()},
        {"mm_features": (1,)},
        {"prompt_embeds": object()},
        {"skip_reading_prefix_cache": True},
        {"sampling_params": None},
    ):
        request = FakeRequest("r", 10)
        for name, value in change.items():
            setattr(request, name, value)
        assert vllm.side.matched(request, 0) == (0, False), change
        vllm.side.finished(request)


def test_a_prompt_with_images_says_why_it_stays() -> None:
    vllm = with_news()
    request = FakeRequest("seen", 10, at("remote"), mm_features=(1,))
    assert vllm.side.matched(request, 4) == (0, False)
    [report] = vllm.side.take_reports().values()
    assert report.place == "local" and report.reason == "the prompt has images"
    assert report.num_cached_tokens == 4
    assert vllm.side.matched(request, 4) == (0, False)
    assert not vllm.side.take_reports(), "it is said once"


# ---- cases of vLLM's own connectors, by their issues ------------------------------------------


def test_issue_48633_c3_a_partial_prefix_hit_fills_the_blocks_after_it() -> None:
    vllm = with_news()
    request = vllm.add(FakeRequest("r", 15))
    (offer,) = vllm.step(num_cached=2 * BLOCK_SIZE).offers
    assert offer.num_cached_blocks == 2 and offer.block_ids == request.block_ids
    assert offer.token_ids == list(range(14)), "the prefill worker names blocks by their place"


def test_issue_48633_c1_a_request_aborted_after_its_offer_keeps_its_blocks() -> None:
    vllm = with_news()
    request, key = offered(vllm)
    blocks = set(request.block_ids)
    vllm.abort(request)
    assert not blocks & set(vllm.pool.free), "nothing has said yet that no write can land"
    assert vllm.step().cancelled == [key]
    assert not set(vllm.side._pinned[key]) & set(vllm.pool.free)
    vllm.rank.settle(key)
    vllm.step()
    assert blocks <= set(vllm.pool.free)


def test_issue_56104_blocks_of_a_failed_load_wait_for_sibling_writes() -> None:
    vllm = with_news(num_blocks=8)
    request, key = offered(vllm)
    blocks = request.block_ids
    vllm.rank.give_up(key, quarantined=True)
    vllm.step()
    vllm.step()
    assert request.status == "running" and not set(request.block_ids) & set(blocks)
    assert vllm.side.is_busy and set(blocks) == set(vllm.side._pinned[key])
    vllm.rank.settle(key)
    vllm.step()
    assert not vllm.side.is_busy


def test_issue_55470_a_write_after_the_lease_finds_its_blocks_free_of_others() -> None:
    vllm = with_news(num_blocks=6)
    _, key = offered(vllm)
    vllm.rank.give_up(key, quarantined=True)
    others = [vllm.add(FakeRequest(f"other{i}", 8, at("local"))) for i in range(3)]
    for _ in range(5):
        vllm.step()  # each step checks the blocks that may still be written
    assert sum(other.status == "running" for other in others) <= 1
    vllm.rank.settle(key)
    vllm.step()
    assert not vllm.side.is_busy


def test_issue_46283_an_aborted_load_whose_prefill_worker_is_gone_leaks_nothing() -> None:
    vllm = with_news()
    request, key = offered(vllm)
    vllm.abort(request)
    vllm.step()
    assert "r0" not in vllm.requests, "an aborted request ends with the next step"
    vllm.rank.settle(key)  # the lease and its grace are over
    vllm.step()
    assert len(vllm.pool.free) == len(vllm.pool.blocks) and not vllm.side.is_busy


def test_issue_50754_a_failed_post_is_computed_here_and_not_offered_again() -> None:
    vllm = with_news()
    request, key = offered(vllm)
    vllm.rank.give_up(key, quarantined=False)  # its prefill worker has settled with an error
    vllm.step()
    vllm.step()
    assert request.status == "running" and not vllm.side.is_busy
    assert request.num_computed_tokens > 0, "computed here"


def test_issue_57705_after_the_load_a_preempted_request_is_not_loaded_again() -> None:
    vllm = with_news()
    request, key = offered(vllm)
    vllm.rank.prove(key)
    vllm.step()
    assert vllm.side.matched(request, 0) == (0, False)


# ---- tickets ----------------------------------------------------------------------------------


def test_blocks_of_a_tickets_prompt_stay_after_the_request_until_they_are_read() -> None:
    vllm = with_news()
    request = vllm.add(FakeRequest("t", 10, for_ticket("ticket")))
    vllm.step(chunk=8)
    vllm.step(chunk=8)
    assert [each.num_tokens for each in vllm.progress] == [8, 10]
    blocks = set(request.block_ids)
    vllm.finish(request)
    assert vllm.step().over == ["ticket"] and not blocks & set(vllm.pool.free)
    vllm.rank.read("ticket")
    vllm.step()
    assert blocks <= set(vllm.pool.free)


def test_a_key_that_a_caller_makes_up_pins_nothing_at_a_decode_worker() -> None:
    vllm = FakeVllm(takes=False)
    vllm.step()
    request = vllm.add(FakeRequest("t", 10, for_ticket("made up") | at("local")))
    vllm.step()
    assert request.status == "running" and not vllm.progress and not vllm.side.is_busy


# ---- several ranks ----------------------------------------------------------------------------


def test_the_request_comes_back_when_the_last_rank_has_proven_its_part() -> None:
    vllm = with_news(num_ranks=2)
    request, key = offered(vllm)
    vllm.ranks[1].prove(key)
    vllm.step()
    assert request.status == "loading"
    vllm.ranks[0].prove(key)
    vllm.step()
    assert request.status == "running" and not vllm.side.is_busy


def test_a_part_that_is_given_up_ends_those_of_the_other_ranks_and_each_may_still_be_written() -> (
    None
):
    vllm = with_news(num_ranks=2)
    request, key = offered(vllm)
    blocks = set(request.block_ids)
    vllm.ranks[1].give_up(key, quarantined=True)
    vllm.step()
    assert request.status == "loading" and key in vllm.ranks[0].offers
    assert vllm.step().cancelled == [key]
    assert request.status == "waiting" and not blocks & set(vllm.pool.free)
    vllm.ranks[1].settle(key)
    vllm.step()
    assert vllm.side.is_busy, "the first rank's part may still be written"
    assert not blocks & set(vllm.pool.free)
    vllm.ranks[0].settle(key)
    vllm.step()
    assert not vllm.side.is_busy and request.status == "running"


def test_a_rank_that_has_proven_its_part_need_not_settle() -> None:
    vllm = with_news(num_ranks=2)
    request, key = offered(vllm)
    vllm.ranks[0].prove(key)
    vllm.ranks[1].give_up(key, quarantined=True)
    assert not vllm.step().cancelled and not vllm.step().cancelled, "no other part is open"
    assert request.num_computed_tokens > 0 and vllm.side.is_busy
    vllm.ranks[1].settle(key)
    vllm.step()
    assert not vllm.side.is_busy


def test_blocks_of_a_tickets_prompt_stay_until_all_ranks_have_read_them() -> None:
    vllm = with_news(num_ranks=2)
    request = vllm.add(FakeRequest("t", 10, for_ticket("ticket")))
    assert vllm.step().begun == ["ticket"] and not vllm.step().begun
    blocks = set(request.block_ids)
    vllm.finish(request)
    for rank in (1, 0):
        assert not blocks & set(vllm.pool.free)
        for _ in range(2):  # a ticket that is over answers each step of its prompt
            vllm.ranks[rank].read("ticket")
            vllm.step()
    assert blocks <= set(vllm.pool.free) and not vllm.side.is_busy


def test_a_prefill_worker_counts_if_no_rank_excludes_it() -> None:
    here, there = (PrefillView(DisaggConfig(), num, True, 3, 9 * num) for num in (2, 1))
    news = News(here, {0: [Released("a")]}).aggregate(News(there, {1: [Released("b")]}))
    assert news == News(there, {0: [Released("a")], 1: [Released("b")]})


class Handoffs(RuleBasedStateMachine):
    """Requests come, are aborted and end; loads are proven or fail; writes settle late."""

    num_ranks = 1

    def __init__(self) -> None:
        super().__init__()
        self.vllm = with_news(10, self.num_ranks)
        self.count = 0

    @rule(
        num_tokens=st.integers(1, 20),
        params=st.sampled_from([None, at("local"), at("remote"), "ticket"]),
    )
    def add(self, num_tokens: int, params: object) -> None:
        self.count += 1
        given = for_ticket(f"t{self.count}") if params == "ticket" else params
        assert given is None or isinstance(given, dict)
        self.vllm.add(FakeRequest(f"q{self.count}", num_tokens, given))

    @rule(num_cached=st.sampled_from([0, 4, 8]), chunk=st.integers(1, 8))
    def step(self, num_cached: int, chunk: int) -> None:
        self.vllm.step(num_cached, chunk)

    @rule(place=st.sampled_from([REMOTE, PrefillView(DisaggConfig(), 0, True, 0)]))
    def prefill_workers_come_and_go(self, place: PrefillView) -> None:
        self.vllm.view = place

    @precondition(lambda self: self.vllm.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [each for each in self.vllm.requests.values() if each.status != "finished"]
        if live:
            self.vllm.abort(data.draw(st.sampled_from(live)))

    @precondition(lambda self: any(rank.offers for rank in self.vllm.ranks))
    @rule(data=st.data(), end=st.sampled_from(["proven", "failed", "quarantined"]))
    def end_a_load(self, data: st.DataObject, end: str) -> None:
        rank = data.draw(st.sampled_from([each for each in self.vllm.ranks if each.offers]))
        key = data.draw(st.sampled_from(list(rank.offers)))
        if end == "proven":
            rank.prove(key)
        else:
            rank.give_up(key, quarantined=end == "quarantined")

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(self.vllm.ranks))
        if given_up := [key for key in rank.writable if key not in rank.offers]:
            rank.settle(data.draw(st.sampled_from(given_up)))

    @rule()
    def sources_are_read(self) -> None:
        for progress in self.vllm.progress:
            for rank in self.vllm.ranks:
                rank.read(progress.key)
        self.vllm.progress.clear()

    @invariant()
    def no_write_can_hit_another_request(self) -> None:
        self.vllm.check()

    def teardown(self) -> None:
        vllm = self.vllm
        for request in list(vllm.requests.values()):
            if request.status != "finished":
                vllm.abort(request)
        for _ in range(2):  # a part that one rank gives up ends at the others with the next step
            vllm.step()
        for rank in vllm.ranks:
            for key in list(rank.writable.keys() - rank.offers.keys()):
                rank.settle(key)
        self.sources_are_read()
        vllm.step()
        assert not vllm.requests and not vllm.side.is_busy
        assert len(vllm.pool.free) == len(vllm.pool.blocks), "blocks leak"


class HandoffsOfTwoRanks(Handoffs):
    num_ranks = 2


TestHandoffs = Handoffs.TestCase
TestHandoffsOfTwoRanks = HandoffsOfTwoRanks.TestCase
TestHandoffs.settings = TestHandoffsOfTwoRanks.settings = settings(
    max_examples=40, stateful_step_count=30
)
