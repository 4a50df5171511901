"""Prompts scored through the whole stack: as transformers scores them, wherever they are sent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.models.paths import BUNDLED_MODEL
from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

QUESTIONS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo"}
TEXT = " ".join(f"The capital of {country} is {city}." for country, city in QUESTIONS.items())
Score = Callable[[list[int]], torch.Tensor]  # -> [num_tokens - 1, vocab_size]


@pytest.fixture(scope="module")
def score() -> Score:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()

    def score(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0, :-1]
            return logits.log_softmax(-1)

    return score


@pytest.mark.parametrize("place", [None, "local", "remote"])
async def test_a_prompt_has_the_log_probabilities_of_transformers(
    cluster: Cluster, score: Score, place: str | None
) -> None:
    headers = {} if place is None else {"x-tandem-prefill": place}
    token_ids = AutoTokenizer.from_pretrained(BUNDLED_MODEL).encode(TEXT)
    expected = score(token_ids)
    # In the cache by the same way, and then scored: as a whole, and as a stream.
    plain = await cluster.complete(token_ids, max_tokens=1, temperature=0, headers=headers)
    assert plain.place == (place or "local")
    asked = {"echo": True, "logprobs": 2, "headers": headers}
    whole = await cluster.complete(token_ids, max_tokens=0, **asked)
    stream = await cluster.complete(token_ids, max_tokens=0, stream=True, **asked)
    parts = [chunk["choices"][0]["logprobs"] for chunk in stream.chunks if chunk["choices"]]
    [listed] = [part for part in parts if part]
    assert whole.text == stream.text == TEXT
    assert whole.body["choices"][0]["logprobs"] == listed
    assert whole.body["usage"]["completion_tokens"] == 0
    assert listed["token_logprobs"][0] is None and listed["top_logprobs"][0] is None
    chosen = expected[range(len(token_ids) - 1), token_ids[1:]].tolist()
    assert listed["token_logprobs"][1:] == pytest.approx(chosen, abs=1e-4)
    for row, top in enumerate(listed["top_logprobs"][1:]):
        assert max(top.values()) == pytest.approx(expected[row].max().item(), abs=1e-4)
    again = await cluster.complete(token_ids, max_tokens=1, temperature=0, headers=headers)
    assert again.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert again.text == plain.text


def questions() -> list[dict[str, Any]]:
    choices = list(QUESTIONS.values())
    return [
        {"question": f"The capital of {country} is", "choices": choices, "answer": number}
        for number, country in enumerate(QUESTIONS)
    ]


def scored_docs(score: Score, docs: list[dict[str, Any]]) -> list[list[tuple[float, bool]]]:
    """Sum of log probabilities of each choice of each doc, and True where it is the likeliest."""
    tokenizer, found = AutoTokenizer.from_pretrained(BUNDLED_MODEL), []
    for doc in docs:
        begin = len(tokenizer.encode(doc["question"]))
        scores = []
        for choice in doc["choices"]:
            ids = tokenizer.encode(f"{doc['question']} {choice}")
            rows, end = score(ids)[begin - 1 :], ids[begin:]
            is_greedy = rows.argmax(-1).tolist() == end
            scores.append((rows[range(len(rows)), end].sum().item(), is_greedy))
        found.append(scores)
    return found


async def test_a_client_that_scores_choices_in_batches_gets_its_sums(
    cluster: Cluster, score: Score
) -> None:
    """The requests and the arithmetic of lm-evaluation-harness, `local-completions`."""
    docs = questions()
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    for doc, expected in zip(docs, scored_docs(score, docs), strict=True):
        begin = len(tokenizer.encode(doc["question"]))
        prompts = [tokenizer.encode(f"{doc['question']} {choice}") for choice in doc["choices"]]
        options = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        answer = await cluster.complete(prompts, **options)
        for choice, (total, is_greedy) in zip(answer.body["choices"], expected, strict=True):
            listed = choice["logprobs"]
            own, tops = listed["token_logprobs"][begin:-1], listed["top_logprobs"][begin:-1]
            assert sum(own) == pytest.approx(total, abs=1e-3)
            best = [max(top.values()) for top in tops]
            assert (own == best) == is_greedy
