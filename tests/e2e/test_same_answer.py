"""The answer never depends on where the prompt was computed, nor on what was cached."""

import asyncio
import random

import pytest

from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 1234}
PENALIZED = {
    "temperature": 0.7,
    "seed": 7,
    "top_k": 40,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
}
QUESTIONS = ["Hello!", "What is the capital of France?", "Tell me a story about a fox."]


def words(num_words: int, seed: int) -> str:
    draw = random.Random(seed)
    vocabulary = ["the", "fox", "ran", "over", "green", "hills", "and", "saw", "an", "old", "house"]
    return " ".join(draw.choice(vocabulary) for _ in range(num_words))


def asking(place: str) -> dict[str, dict[str, str]]:
    return {"headers": {"x-tandem-prefill": place}}


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALIZED], ids=["greedy", "seeded", "all"])
async def test_local_and_remote_give_the_same_text(
    cluster: Cluster, sampling: dict[str, object]
) -> None:
    async def both(question: str) -> None:
        texts = []
        for place in ("local", "remote"):
            # a salt of its own: nothing is shared with the other runs
            salt = f"{place} {sampling}"
            answer = await cluster.chat(
                question, max_tokens=40, cache_salt=salt, **sampling, **asking(place)
            )
            assert (answer.status, answer.place) == (200, place)
            texts.append(answer.text)
        assert texts[0] == texts[1] and texts[0]

    await asyncio.gather(*[both(question) for question in QUESTIONS])


async def test_every_policy_gives_the_same_text(cluster: Cluster) -> None:
    prompts = [words(n, seed=n) for n in (5, 90, 400)]
    texts: dict[str, list[str]] = {}
    await cluster.set_config("disagg.max_local_prefill_length", 200)
    for policy in ("always_local", "always_remote", "threshold", "adaptive"):
        await cluster.set_config("disagg.policy", policy)
        answers = [
            await cluster.complete(prompt, max_tokens=24, cache_salt=policy, **options)
            for prompt in prompts
            for options in (GREEDY, SEEDED)
        ]
        texts[policy] = [answer.text for answer in answers]
        if policy != "adaptive":
            places = [answer.place for answer in answers[::2]]
            expected = {
                "always_local": ["local"] * 3,
                "always_remote": ["remote"] * 3,
                "threshold": ["local", "local", "remote"],
            }
            assert places == expected[policy]
    assert all(these == texts["always_local"] for these in texts.values())
    await cluster.set_config("disagg.max_local_prefill_length", 1000)


@pytest.mark.parametrize("place", ["local", "remote"])
async def test_a_prefix_hit_changes_nothing_but_the_work(cluster: Cluster, place: str) -> None:
    prompt = words(150, seed=99)
    options = {"max_tokens": 16, "cache_salt": place, **GREEDY, **asking(place)}
    cold = await cluster.complete(prompt, **options)
    warm = await cluster.complete(prompt, **options)
    assert cold.text == warm.text
    assert cold.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    num_cached = warm.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    num_prompt = warm.body["usage"]["prompt_tokens"]
    assert num_cached % 16 == 0 and num_prompt - 16 <= num_cached < num_prompt


async def test_a_longer_prompt_reuses_the_blocks_of_a_shorter_one(cluster: Cluster) -> None:
    head, tail = words(120, seed=5), words(60, seed=6)
    undisturbed = await cluster.complete(head + " " + tail, max_tokens=16, cache_salt="a", **GREEDY)
    await cluster.complete(head, max_tokens=4, cache_salt="b", **GREEDY, **asking("local"))
    partly_cached = await cluster.complete(
        head + " " + tail, max_tokens=16, cache_salt="b", **GREEDY, **asking("remote")
    )
    assert partly_cached.text == undisturbed.text
    assert partly_cached.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_logprobs_are_the_same_from_both_sides(cluster: Cluster) -> None:
    answers = [
        await cluster.complete(
            words(40, seed=3),
            max_tokens=6,
            ignore_eos=True,
            logprobs=3,
            cache_salt=place,
            **GREEDY,
            **asking(place),
        )
        for place in ("local", "remote")
    ]
    local, remote = (answer.body["choices"][0]["logprobs"] for answer in answers)
    assert local["tokens"] == remote["tokens"] and len(local["tokens"]) == 6
    assert local["token_logprobs"] == pytest.approx(remote["token_logprobs"], abs=1e-4)


async def test_salts_keep_tenants_apart(cluster: Cluster) -> None:
    prompt = words(80, seed=17)
    for salt in ("one", "two"):
        answer = await cluster.complete(prompt, max_tokens=1, cache_salt=salt, **GREEDY)
        assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_the_pools_balance_afterwards(cluster: Cluster) -> None:
    await cluster.balanced()
