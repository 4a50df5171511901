"""Answers under a grammar that two workers share: one computes the prompt, or both the answer."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.store.discovery import models_prefix
from tandem.runtime.wire.cluster_messages import ModelCard
from tandem.runtime.wire.messages import Grammar, PrefillPlace, SamplingParams, StopConditions
from tests.grammar.answers import CASES
from tests.handoff_peer import MODEL, Text
from tests.worker.pair import Pair

PROMPT = [7 + 3 * i % 250 for i in range(21)]
KINDS = ("regex", "lark", "gbnf")  # short enough for the model's little pool
STOP = StopConditions(max_tokens=60)

pytestmark = pytest.mark.asyncio(loop_scope="module")


def sampling(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.2, seed=seed, logprobs=2)


async def answered(pair: Pair, kind: str, seed: int, place: PrefillPlace) -> Text:
    answer = await pair.ask(
        pair.one,
        [*PROMPT, seed],
        place=place,
        sampling=sampling(seed),
        stop=STOP,
        grammar=CASES[kind].grammar,
    )
    text = await answer.whole()
    assert answer.report is not None and answer.report.place == place
    return text


@pytest.mark.parametrize("kind", KINDS)
async def test_a_remote_prefill_gives_the_answer_of_a_local_one(
    pair: Pair, tiny_model: Path, kind: str
) -> None:
    """The prefill worker draws the first token, the decode worker goes on after it."""
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    places: list[PrefillPlace] = ["remote", "local"]
    remote, local = [await answered(pair, kind, 1, place) for place in places]
    assert remote.token_ids == local.token_ids and remote.finish_reason == "stop"
    assert CASES[kind].is_valid(tokenizer.decode(remote.token_ids))
    for one, other in zip(remote.logprobs, local.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("place", ["remote", "local"])
async def test_an_answer_resumes_under_its_grammar_on_another_worker(
    pair: Pair, place: PrefillPlace
) -> None:
    whole = await answered(pair, "lark", 3, "local")
    assert len(whole.token_ids) > 2
    for cut in (1, len(whole.token_ids) // 2, len(whole.token_ids) - 1):
        answer = await pair.ask(
            pair.two,
            [*PROMPT, 3, *whole.token_ids[:cut]],
            place=place,
            sampling=sampling(3),
            stop=STOP,
            grammar=CASES["lark"].grammar,
            num_generated=cut,
        )
        assert (await answer.whole()).token_ids == whole.token_ids[cut:]


async def test_rules_of_tokens_hold_wherever_the_answer_is_computed(pair: Pair) -> None:
    allowed = list(range(40, 60))
    bad_words = [[one, other] for one in allowed for other in allowed if other < one]
    params = SamplingParams(temperature=2.0, seed=3, allowed_token_ids=allowed, bad_words=bad_words)
    stop = StopConditions(max_tokens=12)
    places: list[PrefillPlace] = ["remote", "local"]
    remote, local = [
        await (await pair.ask(pair.one, PROMPT, place=place, sampling=params, stop=stop)).whole()
        for place in places
    ]
    assert remote.token_ids == local.token_ids == sorted(local.token_ids)
    assert set(local.token_ids) <= set(allowed) and len(local.token_ids) == 12
    for cut in (1, 5, 11):
        begun = [*PROMPT, *local.token_ids[:cut]]
        answer = await pair.ask(pair.two, begun, sampling=params, stop=stop, num_generated=cut)
        assert (await answer.whole()).token_ids == local.token_ids[cut:]


async def test_a_grammar_with_a_fault_is_refused_and_no_other_answer_notices(pair: Pair) -> None:
    expected = pair.undisturbed(PROMPT, 20)
    other = await pair.ask(pair.one, PROMPT, num_tokens=20)
    bad = await pair.ask(pair.one, PROMPT, grammar=Grammar("regex", "(a"))
    with pytest.raises(InvalidRequestError, match="unclosed group") as caught:
        await bad.whole()
    assert caught.value.param == "grammar"
    assert (await other.whole()).token_ids == expected.token_ids


async def test_a_client_that_leaves_while_its_grammar_compiles_leaves_nothing(pair: Pair) -> None:
    answers = [
        await pair.ask(pair.one, PROMPT, grammar=Grammar("regex", f"a{{{i + 1}}}"))
        for i in range(3)
    ]
    for answer in answers:
        answer.context.cancel("gone")
    await asyncio.gather(*(answer.ended.wait() for answer in answers))
    assert (await answered(pair, "regex", 1, "local")).finish_reason == "stop"
    assert not pair.one.decode.active


async def test_the_card_of_a_worker_tells_that_it_takes_grammars(pair: Pair) -> None:
    node = pair.peer.node
    cards = await node.discovery.get_prefix(models_prefix(node.config.namespace, MODEL))
    assert len(cards) == 2
    for data in cards.values():
        card = msgspec.json.decode(data, type=ModelCard)
        assert card.supports_grammar and card.supports_token_rules
