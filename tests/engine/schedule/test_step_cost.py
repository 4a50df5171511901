import random
import statistics
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tandem.engine.config import DeviceKind, EngineConfig
from tandem.engine.schedule.sequence import Chunk
from tandem.engine.schedule.step_cost import (
    DECAY,
    DECAY_AT_A_SURPRISE,
    DECODES_OBSERVED_EVERY,
    FIRST_TOKENS,
    FLOOR_GROWTH,
    FLOOR_TOKENS,
    NUM_OBSERVED,
    OUTLIER,
    SAFETY,
    LinearCost,
    PromptBudget,
    StepCost,
    StepWork,
    longest_step_s,
    work_of,
)
from tandem.runtime.wire.cluster_messages import StepCosts

LIMIT_S = 0.05
SEQ = SimpleNamespace()  # costs depend on no sequence


def decodes(count: int, context: int = 1000) -> list[Chunk]:
    return [Chunk(SEQ, context - 1, context, True)] * count


def prompt(start: int, num_tokens: int) -> Chunk:
    return Chunk(SEQ, start, start + num_tokens, False)


def device(
    base_s: float = 4e-3, per_decode_s: float = 3e-5, per_token_s: float = 2.5e-5, noise: float = 0
) -> Callable[[list[Chunk]], float]:
    """Seconds of a step: linear, with attention by context, and the given noise."""
    rng = random.Random(1)

    def seconds(chunks: list[Chunk]) -> float:
        work = work_of(chunks)
        exact = (
            base_s
            + work.num_decodes * per_decode_s
            + work.decode_context * 1e-8
            + work.num_prompt_tokens * per_token_s
            + work.prompt_context * 2e-9
        )
        return exact * rng.uniform(1 - noise, 1 + noise)

    return seconds


def prefill_beside(
    cost: StepCost, seconds: Callable[[list[Chunk]], float], num_decodes: int, num_tokens: int
) -> list[tuple[int, float]]:
    """(tokens, seconds) of each step that a prompt takes beside decodes, after some without it."""
    alone = decodes(num_decodes)
    for _ in range(40):
        cost.observe(alone, seconds(alone))
    steps, start = [], 0
    while start < num_tokens:
        count = min(num_tokens - start, cost.room(work_of(alone), start), 2048)
        chunks = [*alone, prompt(start, count)]
        took = seconds(chunks)
        cost.observe(chunks, took)
        steps.append((count, took))
        start += count
    return steps


def test_a_long_prompt_never_takes_decodes_over_the_limit_and_uses_most_of_it() -> None:
    steps = prefill_beside(StepCost(LIMIT_S), device(noise=0.03), 32, 32_768)
    assert max(took for _, took in steps) <= LIMIT_S
    assert [count for count, _ in steps[:3]] == [FIRST_TOKENS, 2 * FIRST_TOKENS, 4 * FIRST_TOKENS]
    late = [took for _, took in steps[6:-1]]
    assert min(late) > 0.75 * LIMIT_S
    assert steps[-2][0] < steps[8][0]  # the further the prompt, the dearer its tokens


def launched(seconds: Callable[[list[Chunk]], float], floor_s: float) -> Callable[..., float]:
    """The same of a device that waits for the launches of every step with prompts."""
    return lambda chunks: max(seconds(chunks), floor_s if work_of(chunks).num_prompt_tokens else 0)


def knowing_its_floor(seconds: Callable[[list[Chunk]], float]) -> StepCost:
    """A cost that has seen prompts alone, as a worker's start measures them."""
    cost = StepCost(LIMIT_S, has_floor=True)
    for length in (32, 128, 512, 2048):
        cost.observe([prompt(0, length)], seconds([prompt(0, length)]))
    return cost


@pytest.mark.parametrize("floor_s", [0.034, 0.06])
def test_tokens_that_cost_no_more_than_the_launches_do_are_taken(floor_s: float) -> None:
    seconds = launched(device(), floor_s)
    steps = prefill_beside(knowing_its_floor(seconds), seconds, 64, 32_768)
    longest_s = max(LIMIT_S, floor_s)
    assert max(took for _, took in steps) <= 1.5 * longest_s  # at the floor little is learned
    assert max(took for _, took in steps[9:]) <= 1.05 * longest_s
    assert min(count for count, _ in steps[:16]) > 700
    assert steps[16][0] > steps[-2][0]  # the further the prompt, the dearer its tokens


def test_steps_at_the_floor_change_no_cost() -> None:
    cost = knowing_its_floor(launched(device(), 0.034))
    known = cost.prompt_s
    for count in (16, 64, 300):
        cost.observe([*decodes(8), prompt(0, count)], 0.034)
    assert cost.prompt_s == known
    assert cost.floor_s == pytest.approx(0.034, rel=0.05)


@pytest.mark.parametrize(
    ("num_tokens", "seconds", "floor_s"),
    [
        (100, 0.036, 0.03 * FLOOR_GROWTH),  # its 2 ms are shorter than the launches
        (100, 0.0301, 0.0301),
        (100, 0.02, 0.02),
        (2000, 0.02, 0.02),
        (2000, 0.036, 0.03),  # its 40 ms bind
    ],
)
def test_a_floor_follows_steps_that_are_shorter_and_slowly_those_that_launches_bind(
    num_tokens: int, seconds: float, floor_s: float
) -> None:
    costs = StepCosts((7e-3, 0.0, 0.0), (0.0, 2e-5, 0.0), LIMIT_S, 2048, 512, prompt_floor_s=0.03)
    cost = StepCost.known(costs)
    cost.observe([prompt(0, num_tokens)], seconds)
    assert cost.floor_s == pytest.approx(floor_s)


def test_steps_full_of_prompts_raise_no_floor() -> None:
    """A worker that computed long prompts alone keeps steps beside decodes under the limit."""
    seconds = launched(device(), 0.03)
    cost = knowing_its_floor(seconds)
    for length in (2048, 4096, 8192) * 130:
        cost.observe([prompt(0, length)], seconds([prompt(0, length)]))
    assert cost.floor_s == pytest.approx(0.03, rel=0.05)
    steps = prefill_beside(cost, seconds, 32, 20_000)
    assert max(took for _, took in steps) <= 1.05 * LIMIT_S


def test_prompts_go_on_where_decodes_alone_take_longer_than_the_limit() -> None:
    steps = prefill_beside(StepCost(LIMIT_S), device(base_s=0.08), 32, 400)
    assert {count for count, _ in steps[3:]} == {FLOOR_TOKENS}
    cost = StepCost(LIMIT_S)
    cost.observe([prompt(0, 16)], 3600.0)
    assert cost.room(work_of(decodes(4)), 0) >= FLOOR_TOKENS


def test_a_step_that_compiled_something_is_soon_forgotten() -> None:
    cost, seconds = StepCost(LIMIT_S), device()
    cost.observe(decodes(8), 20.0)
    cost.observe([*decodes(8), prompt(0, 64)], 20.0)
    steps = prefill_beside(cost, seconds, 8, 20_000)
    assert sum(count for count, _ in steps[:80]) > 8000
    assert max(took for _, took in steps) <= LIMIT_S


def test_a_device_that_becomes_slower_is_followed_within_a_few_steps() -> None:
    cost = StepCost(LIMIT_S)
    prefill_beside(cost, device(), 32, 10_000)
    steps = prefill_beside(cost, device(per_token_s=1e-4), 32, 10_000)
    assert all(took <= LIMIT_S for _, took in steps[8:])


def test_no_more_than_twice_of_what_was_within_the_limit_is_tried() -> None:
    cost = StepCost(LIMIT_S)
    largest = FIRST_TOKENS // 2
    for _ in range(12):
        room = cost.room(work_of(decodes(4)), 0)
        assert room == 2 * largest
        cost.observe([*decodes(4), prompt(0, room)], 1e-9)
        largest = room


chunk_lists = st.lists(
    st.builds(
        lambda start, count: Chunk(SEQ, start, start + count, False),
        st.integers(0, 100_000),
        st.integers(1, 4096),
    ),
    min_size=1,
    max_size=6,
)


@given(
    steps=st.lists(st.tuples(chunk_lists, st.floats(0, 100)), max_size=30),
    num_decodes=st.integers(0, 256),
    start=st.integers(0, 200_000),
)
def test_there_is_always_room_for_a_floor_whatever_was_measured(
    steps: list[tuple[list[Chunk], float]], num_decodes: int, start: int
) -> None:
    cost = StepCost(LIMIT_S)
    for chunks, seconds in steps:
        cost.observe(chunks, seconds)
    work = work_of(decodes(num_decodes))
    room = cost.room(work, start)
    assert room >= FLOOR_TOKENS
    work.add_prompt(start, room)
    assert 0 <= cost.room(work, 0) <= 2**31


def test_work_counts_chunks_of_one_token_as_decodes() -> None:
    work = work_of([*decodes(3, context=10), prompt(100, 20)])
    assert work == StepWork(3, 30, 20, 20 * 110)
    assert [work.num_multiplied(tile_tokens) for tile_tokens in (1, 2, 64)] == [20, 24, 64]


def test_a_budget_is_spent_by_prompts_and_closed_by_one_that_goes_on() -> None:
    cost = StepCost(LIMIT_S)
    budget = PromptBudget(100, cost, [])
    assert budget.room(5000) == 100  # without decodes there is no hurry
    budget.take(Chunk(SEQ, 50, 80, True))
    assert budget.room(0) == 70
    budget.take(Chunk(SEQ, 0, 30, False))
    assert budget.room(0) == 0
    beside = PromptBudget(100, cost, decodes(2))
    assert beside.room(0) == FIRST_TOKENS
    beside.take(Chunk(SEQ, 0, FIRST_TOKENS, True))
    assert beside.room(0) == 0


@pytest.mark.parametrize(
    ("max_step_ms", "kind", "seconds"),
    [(None, "gpu", 0.05), (None, "cpu", 0.25), (7.5, "gpu", 0.0075)],
)
def test_the_limit_depends_on_the_device_unless_it_is_configured(
    max_step_ms: float | None, kind: DeviceKind, seconds: float
) -> None:
    assert longest_step_s(EngineConfig(max_step_ms=max_step_ms), kind) == seconds


def test_an_engine_keeps_its_decodes_within_the_limit(fake: SimpleNamespace) -> None:
    harness = fake.make_harness(
        num_blocks=4000, max_num_batched_tokens=4096, prefill_chunk_tokens=4096, max_step_ms=50
    )
    runner = harness.runner
    seconds, took = device(per_token_s=1e-4), []

    def timed(chunks: list[Chunk]) -> float:
        took.append((work_of(chunks).num_decodes, seconds(chunks)))
        return took[-1][1]

    runner.seconds_of = timed
    for i in range(4):
        harness.engine.add(fake.make_seq(f"r{i}", [1, 2, 3], 60))
    for _ in range(10):
        harness.step()
    long = fake.make_seq("long", [i % 400 for i in range(3000)], 2)
    expected = fake.undisturbed(long)
    harness.engine.add(long)
    harness.run()
    assert harness.texts["long"] == expected
    spans = [(s, e) for step in runner.steps for name, s, e in step if name == "long" and e - s > 1]
    assert 8 <= len(spans) <= 40
    assert max(each for num_decodes, each in took if num_decodes) <= 0.05


def test_a_known_cost_is_what_was_reported_and_learning_goes_on_from_there() -> None:
    reported = StepCosts((4e-3, 3e-5, 1e-8), (2e-3, 2.5e-5, 2e-9), LIMIT_S, 2048, 512)
    cost = StepCost.known(reported)
    assert cost.decode_s == pytest.approx(reported.decode_s)
    assert cost.prompt_s == pytest.approx(reported.prompt_s)
    assert cost.room(work_of(decodes(32)), 0) > 4 * FIRST_TOKENS
    slower = prefill_beside(cost, device(per_token_s=1e-4), 32, 10_000)
    assert all(took <= LIMIT_S for _, took in slower[8:])
    assert cost.prompt_s[1] > 3 * reported.prompt_s[1]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_prompts_are_learned_right_beside_decodes_of_a_device_that_hides_a_share(
    share: float,
) -> None:
    """A device that reads its weights, 7 ms, while it multiplies does not take the sum."""

    def seconds(chunks: list[Chunk]) -> float:
        work = work_of(chunks)
        prompts_s = 1e-3 + work.num_prompt_tokens * 4e-5
        hidden_s = share * min(7e-3, prompts_s)
        return 7e-3 + work.num_decodes * 3e-5 + prompts_s - hidden_s

    measured = StepCosts((7e-3, 3e-5, 0.0), (1e-3, 4e-5, 0.0), LIMIT_S, 2048, 512)
    cost = StepCost.known(msgspec.structs.replace(measured, hidden_share=share))
    alone, start, took = decodes(32), 0, []
    while start < 50_000:
        chunks = [*alone, prompt(start, cost.room(work_of(alone), start))]
        cost.observe(chunks, seconds(chunks))
        took.append(seconds(chunks))
        start = chunks[-1].end
    assert cost.prompt_s[1] == pytest.approx(4e-5, rel=0.1)
    assert max(took) <= LIMIT_S
    assert statistics.fmean(took[1:]) == pytest.approx(0.9 * LIMIT_S, rel=0.1)


@pytest.mark.parametrize(
    ("num_decodes", "num_tokens", "share", "per_token_s", "slower", "is_learned"),
    [
        (1, 100, 1.0, 2e-5, 1.1, False),  # 2 ms of products, while the weights are read
        (1, 100, 1.0, 2e-5, 0.9, False),
        (1, 100, 0.5, 2e-5, 1.1, False),
        (1, 100, 0.4, 2e-5, 1.1, True),  # most of the products is added
        (1, 400, 1.0, 2e-5, 1.1, True),  # they take longer than the weights
        (0, 100, 1.0, 2e-5, 1.1, True),  # there is nothing to hide behind
        (1, 100, 1.0, 0.0, 1.1, True),  # the cost is not known yet
        (1, 100, 1.0, 2e-5, 1.2, True),  # the costs known are wrong
        (1, 100, 1.0, 2e-5, 0.8, True),
    ],
)
def test_a_step_that_hides_its_prompts_changes_no_cost_unless_it_is_a_surprise(
    num_decodes: int,
    num_tokens: int,
    share: float,
    per_token_s: float,
    slower: float,
    is_learned: bool,
) -> None:
    costs = StepCosts(
        (7e-3, 0.0, 0.0), (0.0, per_token_s, 0.0), LIMIT_S, 2048, 512, hidden_share=share
    )
    cost = StepCost.known(costs)
    decodes_s, prompts_s = 7e-3 if num_decodes else 0.0, num_tokens * per_token_s
    seconds = decodes_s + prompts_s - share * min(decodes_s, prompts_s)
    cost.observe([*decodes(num_decodes), prompt(0, num_tokens)], slower * seconds)
    assert (cost.prompt_s != costs.prompt_s) == is_learned


def tiled(chunks: list[Chunk]) -> float:
    """A device that multiplies tiles of 128 tokens, and reads its weights meanwhile."""
    work = work_of(chunks)
    num_tokens = -(-(work.num_decodes + work.num_prompt_tokens) // 128) * 128
    products_s = num_tokens * 2e-5 if work.num_prompt_tokens else 0.0
    return 1e-3 + max(6e-3, products_s) + work.num_decodes * 2e-5


def steps_beside(cost: StepCost, num_decodes: int) -> tuple[list[int], list[float]]:
    """The prompt tokens and the seconds of the last steps of a long prompt."""
    alone, start = decodes(num_decodes), 0
    counts, took = [], []
    for _ in range(200):
        counts.append(cost.room(work_of(alone), start))
        chunks = [*alone, prompt(start, counts[-1])]
        took.append(tiled(chunks))
        cost.observe(chunks, took[-1])
        start = chunks[-1].end
    return counts[100:], took[100:]


@pytest.mark.parametrize("num_decodes", [1, 45, 120, 128, 200])
def test_a_step_fills_the_tiles_that_it_pays_for(num_decodes: int) -> None:
    costs = StepCosts((7e-3, 2e-5, 0.0), (1e-3, 2e-5, 0.0), 0.012, 8192, 2048, hidden_share=1.0)
    aware = StepCost.known(msgspec.structs.replace(costs, tile_tokens=128))
    counts, took = steps_beside(aware, num_decodes)
    assert {(num_decodes + count) % 128 for count in counts} == {0}
    assert sum(seconds > 0.012 for seconds in took) <= 5  # a tile more is tried now and then
    fitting = int((0.9 * 0.012 - 1e-3 - num_decodes * 2e-5) / 2e-5) // 128 * 128 - num_decodes
    assert statistics.fmean(counts) == pytest.approx(fitting, rel=0.05)


def test_a_full_tile_is_no_longer_filled_by_a_few_tokens() -> None:
    cost = StepCost(LIMIT_S, 128)
    slow = decodes(125)
    for _ in range(50):
        cost.observe(slow, 2 * LIMIT_S)
    assert cost.room(work_of(slow), 0) == 3 + 128  # the least that is more than FLOOR_TOKENS
    assert cost.room(work_of([*slow, prompt(0, 100)]), 0) == 31
    assert cost.room(work_of([*slow, prompt(0, 131)]), 0) == 0


def test_after_a_step_over_the_limit_half_of_what_would_fit_is_proven() -> None:
    costs = StepCosts((0.0, 1e-3, 0.0), (0.0, 1e-5, 0.0), LIMIT_S, 2048, 512)
    for num_tokens, room in ((16, FLOOR_TOKENS), (100, 73)):  # of 100 tokens 73 would fit
        cost = StepCost.known(costs)
        cost.observe([*decodes(60), prompt(0, num_tokens)], 0.061)
        assert cost.room(work_of(decodes(1)), 0) == pytest.approx(room, abs=1)
        beside_another = work_of([*decodes(1), prompt(0, 10)])
        assert cost.room(beside_another, 0) == pytest.approx(room - 10, abs=1)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_prompt_alone_has_no_decodes_to_pay_or_to_hide_behind(share: float) -> None:
    costs = StepCosts((7e-3, 3e-5, 0.0), (1e-3, 4e-5, 0.0), LIMIT_S, 2048, 512, hidden_share=share)
    cost = StepCost.known(costs)
    cost.observe([prompt(0, 512)], costs.prompt_s[0] + 512 * costs.prompt_s[1])
    assert cost.prompt_s == pytest.approx(costs.prompt_s, rel=1e-3, abs=1e-9)


def test_of_many_steps_of_decodes_every_eighth_is_observed() -> None:
    cost, changes = StepCost(LIMIT_S), []
    for number in range(NUM_OBSERVED + 2 * DECODES_OBSERVED_EVERY):
        before = cost.decode_s
        cost.observe(decodes(4), 5e-3 if number < NUM_OBSERVED // 2 else 6e-3)
        changes.append(cost.decode_s != before)
    rarely = [*[False] * (DECODES_OBSERVED_EVERY - 1), True]
    assert changes == [*[True] * NUM_OBSERVED, *rarely, *rarely]


def test_decodes_are_learned_after_many_steps_of_prompts() -> None:
    cost, seconds = StepCost(LIMIT_S), device()
    for _ in range(200):
        cost.observe([prompt(0, 16)], seconds([prompt(0, 16)]))
    cost.observe(decodes(1), 5e-3)
    assert any(cost.decode_s)


@settings(max_examples=100, deadline=None)
@given(
    st.builds(
        StepCosts,
        decode_s=st.tuples(st.floats(1e-3, 0.02), st.floats(0, 1e-4), st.floats(0, 1e-7)),
        prompt_s=st.tuples(st.floats(0, 0.02), st.floats(1e-5, 1e-4), st.floats(0, 1e-7)),
        max_step_s=st.floats(0.01, 0.1),
        max_tokens=st.just(2048),
        max_tokens_beside=st.integers(32, 400),
        hidden_share=st.just(0.0) | st.floats(0, 1),
        prompt_floor_s=st.just(0.0) | st.floats(0, 0.06),
        tile_tokens=st.sampled_from([1, 2, 64]),
    ),
    st.integers(1, 100),
    st.integers(0, 200),
    st.integers(0, 5000),
)
def test_the_room_of_a_step_is_the_most_tokens_that_its_time_allows(
    costs: StepCosts, num_decodes: int, num_before: int, start: int
) -> None:
    """Of whole tiles, and no more than twice as many as were in time before."""
    cost, chunks = StepCost.known(costs), decodes(num_decodes)
    chunks += [prompt(0, num_before)] if num_before > 1 else []
    work, is_tiled = work_of(chunks), costs.tile_tokens > 1
    longest_s = max(SAFETY * costs.max_step_s, costs.prompt_floor_s)
    beside = num_decodes if is_tiled else 0  # whose products share the tiles
    num_before = work.num_prompt_tokens

    def seconds(num_tokens: int) -> float:
        per_step_s, per_decode_s, per_context_s = costs.decode_s
        decode_s = per_step_s + num_decodes * per_decode_s + work.decode_context * per_context_s
        context = work.prompt_context + num_tokens * (start + num_tokens / 2)
        return (
            decode_s - costs.hidden_share * per_step_s + costs.prompt_s[0]
            + (num_before + num_tokens) * costs.prompt_s[1] + context * costs.prompt_s[2]
        )  # fmt: skip

    sizes = [n for n in range(900) if (num_decodes + num_before + n) % costs.tile_tokens == 0]
    assume(all(abs(seconds(n + beside) - longest_s) > 1e-9 for n in sizes))
    most = 2 * costs.max_tokens_beside - num_before
    least = 0 if num_before else FLOOR_TOKENS
    fitting = [n for n in sizes if n <= most and seconds(n + beside) <= longest_s]
    assert cost.room(work, start) == max([*fitting, min(n for n in sizes if n >= least)])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0.1, 1.0), min_size=3, max_size=3),
    st.lists(st.lists(st.floats(0.1, 2.0), min_size=3, max_size=3), min_size=8, max_size=30),
)
def test_a_cost_is_the_weighted_least_squares_of_what_was_seen(
    weights: list[float], seen: list[list[float]]
) -> None:
    matrix = np.array(seen)
    assume(np.linalg.cond(matrix) < 20)
    cost = LinearCost(3, 100.0)
    for features in seen:
        cost.observe(features, float(np.dot(features, weights)))
    assert cost.weights == pytest.approx(weights, rel=0.02, abs=0.01)
    assert cost.predict([1.0, 2.0, 0.0]) == pytest.approx(cost.weights[0] + 2 * cost.weights[1])


@pytest.mark.parametrize(
    ("seconds", "counted_s", "decay"),
    [
        (1.1, 1.1, DECAY),
        (0.9, 0.9, DECAY),
        (1.2, 1.2, DECAY_AT_A_SURPRISE),
        (0.8, 0.8, DECAY_AT_A_SURPRISE),
        (99.0, OUTLIER + 2.0, DECAY_AT_A_SURPRISE),
    ],
)
def test_the_past_fades_with_each_step_and_faster_after_a_surprise(
    seconds: float, counted_s: float, decay: float
) -> None:
    cost = LinearCost(2, slack_s=2.0)
    cost.begin_with([1.0, 3.0])
    cost.observe([1.0, 0.0], seconds)
    mean_s = (decay * 1.0 + counted_s) / (decay + 1)
    assert cost.weights == pytest.approx([mean_s, 3.0], rel=1e-3)


def test_steps_that_are_all_alike_change_the_costs_of_their_features_alike() -> None:
    cost = LinearCost(2, slack_s=100.0)
    cost.begin_with([1.0, 3.0])
    for _ in range(1000):  # after which nothing is left of the beginning
        cost.observe([1.0, 1.0], 5.0)
    assert cost.weights == pytest.approx([1.5, 3.5], rel=1e-3)


def test_no_cost_is_negative() -> None:
    cost = LinearCost(2, 100.0)
    for features, seconds in (([1.0, 1.0], 2.0), ([1.0, 2.0], 1.0), ([1.0, 1.5], 1.5)) * 20:
        cost.observe(features, seconds)
    assert cost.weights[1] == 0.0
    assert cost.weights[0] == pytest.approx(1.5, rel=0.1)


def test_a_target_shortens_the_longest_step() -> None:
    cost = StepCost(1.0)
    for given_ms, ttft_ms, longest_s in (
        (20.0, 300.0, 0.02),
        (90.0, None, 0.05),
        (None, 5.0, 0.05),
    ):
        cost.aim(LIMIT_S, given_ms, ttft_ms, longest_local=7)
        assert (cost.max_step_s, cost.has_target) == (longest_s, given_ms is not None)
        assert cost.longest_local == 7
        assert cost.ttft_target_s == (None if ttft_ms is None else ttft_ms / 1e3)
