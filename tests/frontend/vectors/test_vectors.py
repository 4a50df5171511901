"""Embeddings, rerank and score over HTTP: bodies, shapes, bounds, limits, and workers that fail."""

import base64
import logging
import math
from array import array
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import openai
import pytest

from tandem.frontend.config import FrontendConfig
from tandem.frontend.vectors import batches
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ConnectionLostError, InvalidRequestError
from tandem.runtime.plane.server import Responder
from tandem.runtime.wire.messages import VectorRequest, Vectors, encode, unpack_tokens
from tests.frontend.access.test_access import bearer, entry, keyed
from tests.frontend.frontend_stack import CONTEXT_LENGTH, MODEL, FakeWorker, Stack, token_ids
from tests.services import eventually

EMBEDS = "test/embeds"


def packed(*numbers: float) -> bytes:
    return array("f", numbers).tobytes()


async def vector_of_sums(
    request: VectorRequest, _context: RequestContext, responder: Responder
) -> None:
    """Answers the number and the sum of each input's tokens; of pairs, those of the second text."""
    inputs = [unpack_tokens(each) for each in request.inputs]
    if request.kind == "rerank":
        starts = request.second_starts
        scores = [float(len(ids) - start) for ids, start in zip(inputs, starts, strict=True)]
        responder.send(encode(Vectors([packed(score) for score in scores])))
        return
    rest = [0.5] * ((request.dimensions or 3) - 2)
    responder.send(encode(Vectors([packed(len(ids), sum(ids), *rest) for ids in inputs])))


async def add_worker(stack: Stack, **fields: Any) -> FakeWorker:
    own: dict[str, Any] = {
        "model": EMBEDS,
        "endpoint": "pipeline.backend.generate",
        "model_types": ["embeddings", "rerank"],
        "vector_script": vector_of_sums,
    }
    worker = await stack.add_worker(**own | fields)
    await eventually(lambda: worker.instance_id in stack.server.catalog.instances)
    return worker


@pytest.fixture
async def worker(stack: Stack) -> AsyncIterator[FakeWorker]:
    yield await add_worker(stack)


async def embed(stack: Stack, given: object, **fields: object) -> httpx.Response:
    return await stack.http.post("/v1/embeddings", json={"model": EMBEDS, "input": given} | fields)


async def rerank(stack: Stack, documents: object, **fields: object) -> httpx.Response:
    body = {"model": EMBEDS, "query": "Hello", "documents": documents}
    return await stack.http.post("/v1/rerank", json=body | fields)


def vectors_in(answer: httpx.Response) -> list[list[float]]:
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


def sums(text: str) -> list[float]:
    ids = token_ids(text)
    return [len(ids), sum(ids), 0.5]


# ---- embeddings -------------------------------------------------------------------------------


async def test_every_form_of_an_input_gets_its_vectors_in_order(
    stack: Stack, worker: FakeWorker
) -> None:
    ids = [token_ids("Hello world"), token_ids("the")]
    one, many = await embed(stack, "Hello world"), await embed(stack, ["the", "Hello world"])
    assert vectors_in(one) == [sums("Hello world")]
    assert vectors_in(many) == [sums("the"), sums("Hello world")]
    assert vectors_in(await embed(stack, ids[0])) == [sums("Hello world")]
    assert vectors_in(await embed(stack, ids)) == [sums("Hello world"), sums("the")]
    body = many.json()
    num_tokens = len(ids[0]) + len(ids[1])
    assert body["object"] == "list" and body["model"] == EMBEDS
    assert [(each["object"], each["index"]) for each in body["data"]] == [
        ("embedding", 0), ("embedding", 1),
    ]  # fmt: skip
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert many.headers["x-tandem-decode-instance"] == worker.instance_id


async def test_base64_is_little_endian_float32(stack: Stack, worker: FakeWorker) -> None:
    [text] = vectors_in(await embed(stack, "the", encoding_format="base64", dimensions=4))
    assert isinstance(text, str)
    assert array("f", base64.b64decode(text)).tolist() == [*sums("the"), 0.5]


async def test_the_client_of_openai_reads_both_forms(
    client: openai.AsyncOpenAI, worker: FakeWorker
) -> None:
    whole = await client.embeddings.create(model=EMBEDS, input=["Hello world", "the"])
    plain = await client.embeddings.create(model=EMBEDS, input="the", encoding_format="float")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.embeddings.create(model=MODEL, input="the")
    assert [each.embedding for each in whole.data] == [sums("Hello world"), sums("the")]
    assert plain.data[0].embedding == sums("the")
    assert whole.usage.prompt_tokens == len(token_ids("Hello world")) + len(token_ids("the"))
    assert refused.value.param == "model"
    assert "/v1/embeddings, but at /v1/chat/completions and /v1/completions" in str(refused.value)


async def test_many_inputs_go_in_batches_to_all_workers(stack: Stack, worker: FakeWorker) -> None:
    other = await add_worker(stack)
    texts = ["Hello " * (1 + number % 5) for number in range(500)]
    assert vectors_in(await embed(stack, texts)) == [sums(text) for text in texts]
    asked = [len(each.inputs) for each in worker.vector_requests + other.vector_requests]
    assert sorted(asked) == [20] + [32] * 15
    assert worker.vector_requests and other.vector_requests


WRONG: dict[str, tuple[dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    "embeddings": ({"input": "a"}, [
        ({"input": []}, "input"), ({"input": None}, "input"), ({"input": 5}, "input"),
        ({"input": ["a", 5]}, "input"), ({"input": ["a", None]}, "input"),
        ({"input": ["a", ["b"]]}, "input"), ({"input": ""}, "input[0]"),
        ({"input": ["a", ""]}, "input[1]"), ({"input": [[1], []]}, "input"),
        ({"input": [-1]}, "input"), ({"input": [100_000]}, "input"),
        ({"input": ["a"] * 9}, "input"), ({"input": ["a", "Hello " * CONTEXT_LENGTH]}, "input[1]"),
        ({"encoding_format": "int8"}, "encoding_format"), ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 2**16 + 1}, "dimensions"), ({"model": 7}, "model"),
    ]),
    "rerank": ({"query": "Hello", "documents": ["a"]}, [
        ({"documents": []}, "documents"), ({"documents": ["a"] * 9}, "documents"),
        ({"documents": ["a"] * 1000}, "documents"), ({"documents": [5]}, "documents[0]"),
        ({"documents": [{}]}, "documents[0].text"), ({"documents": "a"}, "documents"),
        ({"documents": ["a", "Hello " * CONTEXT_LENGTH]}, "documents[1]"),
        ({"query": None}, "query"), ({"query": "x" * 10_000}, "query"), ({"top_n": 0}, "top_n"),
    ]),
    "score": ({"text_1": "Hello", "text_2": ["a"]}, [
        ({"text_2": []}, "text_2"), ({"text_2": ["a"] * 9}, "text_2"),
        ({"text_2": ["a"] * 1000}, "text_2"), ({"text_2": [5]}, "text_2[0]"),
        ({"text_2": None}, "text_2"), ({"documents": "a"}, "text_2"), ({"queries": "a"}, "text_1"),
        ({"text_1": ["a", "b"]}, "text_2"), ({"text_1": []}, "text_2"),
        ({"text_2": ["a", "Hello " * CONTEXT_LENGTH]}, "text_2[1]"),
        ({"text_1": "x" * 10_000}, "text_1"), ({"model": MODEL}, "model"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("route", WRONG)
async def test_a_wrong_body_is_refused_by_its_field(route: str) -> None:
    right, wrong = WRONG[route]
    async with Stack(config=FrontendConfig(port=0, max_inputs=8)) as stack:
        worker = await add_worker(stack)
        for fields, param in wrong:
            body = {"model": EMBEDS} | right | fields
            refused = await stack.http.post(f"/v1/{route}", json=body)
            assert refused.status_code == 400, (fields, refused.text)
            assert refused.json()["error"]["param"] == param, fields
        assert not worker.vector_requests


async def test_vectors_beyond_what_one_answer_may_have_are_refused(
    stack: Stack, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_MOST_NUMBERS", 8)
    assert (await embed(stack, ["a", "b"], dimensions=4)).status_code == 200
    refused = await embed(stack, ["a", "b", "c"], dimensions=4)
    assert refused.status_code == 400
    assert "more than the 8 of one answer" in refused.json()["error"]["message"]


# ---- rerank -----------------------------------------------------------------------------------


async def test_documents_come_best_first(stack: Stack, worker: FakeWorker) -> None:
    documents = ["the", "Hello there, the world", {"text": "Hello world"}, "the"]
    body = {"model": EMBEDS, "query": "Hello", "documents": documents}
    texts = ["the", "Hello there, the world", "Hello world", "the"]
    scores = [len(token_ids(text)) for text in texts]
    for path in ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/rerank/"):
        answer = await stack.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert [each["index"] for each in found["results"]] == [1, 2, 0, 3]
        for each in found["results"]:
            assert each["relevance_score"] == scores[each["index"]]
            assert each["document"] == {"text": texts[each["index"]]}
        num_tokens = sum(scores) + 4 * len(token_ids("Hello"))
        assert found["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert found["model"] == EMBEDS and found["id"].startswith("rerank-")


async def test_the_best_alone_without_their_documents(stack: Stack, worker: FakeWorker) -> None:
    answer = await rerank(stack, ["a", "a b c", "a b"], top_n=2, return_documents=False)
    results = answer.json()["results"]
    assert [sorted(each) for each in results] == [["index", "relevance_score"]] * 2
    assert [each["index"] for each in results] == [1, 2]


# ---- score ------------------------------------------------------------------------------------


async def test_pairs_are_scored_in_their_order(stack: Stack, worker: FakeWorker) -> None:
    texts = ["the", "Hello there, the world", "Hello world"]
    for names in (("text_1", "text_2"), ("queries", "items"), ("data_1", "data_2")):
        for first in ("Hello", ["Hello"], ["Hello"] * 3):
            body = {"model": EMBEDS, names[0]: first, names[1]: texts}
            answer = await stack.http.post("/v1/score", json=body)
            assert answer.status_code == 200, answer.text
            found = answer.json()
            scores = [len(token_ids(text)) for text in texts]
            assert found["data"] == [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(scores)
            ]
            num_tokens = sum(scores) + 3 * len(token_ids("Hello"))
            assert found["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
            assert found["object"] == "list" and found["id"].startswith("score-")
        one = {"model": EMBEDS, names[0]: "Hello", names[1]: "the"}
        assert len((await stack.http.post("/score", json=one)).json()["data"]) == 1


async def test_texts_of_a_model_that_only_embeds_are_scored_by_their_cosine(stack: Stack) -> None:
    await add_worker(stack, model_types=["embeddings"])
    texts = ["the", "Hello there, the world"]

    def vector(text: str) -> tuple[float, ...]:
        return len(token_ids(text)), sum(token_ids(text)), 0.5

    def cosine(one: str, other: str) -> float:
        product = sum(a * b for a, b in zip(vector(one), vector(other), strict=True))
        return product / math.hypot(*vector(one)) / math.hypot(*vector(other))

    for first in ("Hello", ["Hello", "world"]):
        body = {"model": EMBEDS, "text_1": first, "text_2": texts}
        answer = await stack.http.post("/v1/score", json=body)
        assert answer.status_code == 200, answer.text
        sides = [first] * 2 if isinstance(first, str) else first
        expected = [cosine(*pair) for pair in zip(sides, texts, strict=True)]
        found = answer.json()
        assert [each["score"] for each in found["data"]] == pytest.approx(expected)
        given = [*([first] if isinstance(first, str) else first), *texts]
        assert found["usage"]["prompt_tokens"] == sum(len(token_ids(each)) for each in given)
    body = {"model": EMBEDS, "text_1": ["a", "Hello " * CONTEXT_LENGTH], "text_2": ["a", "b"]}
    refused = await stack.http.post("/v1/score", json=body)
    assert refused.json()["error"]["param"] == "text_1[1]"


# ---- workers, limits, telemetry ---------------------------------------------------------------


async def test_another_worker_takes_over_from_one_that_is_lost(pair: Stack) -> None:
    async def fails(_request: VectorRequest, _context: RequestContext, _send: Responder) -> None:
        raise ConnectionLostError("as if killed")

    first = await add_worker(pair, vector_script=fails)
    await add_worker(pair, vector_script=fails)
    await add_worker(pair)
    assert vectors_in(await embed(pair, ["the"] * 100)) == [sums("the")] * 100
    assert first.vector_requests


NO_VECTORS: list[list[bytes]] = [
    [], [packed(1.0)] * 3, [b"", b""], [b"abc", b"abc"], [packed(1.0), packed(1.0, 2.0)],
    [packed(1.0), packed(float("nan"))], [packed(float("inf")), packed(float("-inf"))],
]  # fmt: skip


async def test_a_worker_that_answers_something_else_is_at_fault(stack: Stack) -> None:
    answers = iter(NO_VECTORS)

    async def wrong(_request: VectorRequest, _context: RequestContext, send: Responder) -> None:
        send.send(encode(Vectors(next(answers))))

    await add_worker(stack, vector_script=wrong)
    for vectors in NO_VECTORS:
        assert (await embed(stack, ["a", "b"])).status_code == 502, vectors
    assert list(answers) == []


async def test_an_engines_refusal_names_the_clients_field(stack: Stack) -> None:
    async def refuses(_request: VectorRequest, _context: RequestContext, _send: Responder) -> None:
        raise InvalidRequestError("this model has 768 dimensions", param="dimensions")

    await add_worker(stack, vector_script=refuses)
    refused = await embed(stack, "a", dimensions=12)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "dimensions"


async def test_a_key_pays_for_inputs_as_for_prompts() -> None:
    async with keyed(entry("alice", "tokens_per_minute=100")) as stack:
        await add_worker(stack)
        body = {"model": EMBEDS, "input": ["Hello " * 20] * 2}
        num_tokens = 2 * len(token_ids("Hello " * 20))
        paid = await stack.http.post("/v1/embeddings", json=body, headers=bearer("alice"))
        assert paid.status_code == 200
        left = int(paid.headers["x-ratelimit-remaining-tokens"])
        assert 100 - num_tokens <= left <= 100 - num_tokens + 5
        refused = await stack.http.post("/v1/embeddings", json=body, headers=bearer("alice"))
        assert refused.status_code == 429


async def test_log_and_metrics_have_their_tokens(
    stack: Stack, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tandem.frontend.telemetry.request_log"):
        await embed(stack, ["the", "Hello world"])
        await rerank(stack, ["the"])
    num_tokens = len(token_ids("the")) + len(token_ids("Hello world"))
    lines = [record.getMessage() for record in caplog.records]
    assert any("/v1/embeddings: 200" in line and f"{num_tokens}+0 tokens" in line for line in lines)
    assert any("/v1/rerank: 200" in line for line in lines)
    metrics = (await stack.http.get("/metrics")).text
    labels = f'endpoint="/v1/embeddings",model="{EMBEDS}",status="200"'
    assert f"tandem_frontend_requests_total{{{labels}}} 1.0" in metrics
    assert f'tandem_frontend_input_sequence_tokens_count{{model="{EMBEDS}"}} 2.0' in metrics


async def test_models_that_only_embed_refuse_chats_and_are_listed(
    stack: Stack, worker: FakeWorker
) -> None:
    refused = await stack.chat(model=EMBEDS)
    assert refused.status_code == 400
    assert "but at /v1/embeddings and /v1/rerank" in refused.json()["error"]["message"]
    listed = (await stack.http.get("/v1/models")).json()["data"]
    assert {MODEL, EMBEDS} == {each["id"] for each in listed}


async def test_unknown_fields_are_named(stack: Stack, worker: FakeWorker) -> None:
    answer = await embed(stack, "a", input_type="query", user="u")
    assert answer.status_code == 200
    assert answer.headers["x-tandem-ignored"] == "input_type"
    assert msgspec.json.decode(answer.content)["data"]
