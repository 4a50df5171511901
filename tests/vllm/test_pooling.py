"""vLLM's pooling models against transformers: vectors of texts, and scores of pairs."""

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem.models.folder import byte_level_tokenizer, write_tokenizer
from tests.services import EtcdServer, NatsServer
from tests.vllm.vllm_cluster import NEEDS_VLLM, VllmCluster

pytestmark = NEEDS_VLLM
TEXTS = ["It is sunny in Paris.", "The cat sleeps on the sofa.", "a"]


def write_cross_encoder(folder: Path) -> Path:
    import torch
    import transformers

    folder.mkdir()
    write_tokenizer(folder, byte_level_tokenizer(512), max_length_tokens=2048)
    config = transformers.BertConfig(
        vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=256, max_position_embeddings=2048, num_labels=1, pad_token_id=0,
        initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def token_ids(text: str) -> list[int]:
    return byte_level_tokenizer(512).encode(text, add_special_tokens=False).ids


@pytest.fixture
def cluster(nats: NatsServer, etcd: EtcdServer, tmp_path: Path, model: Path) -> Iterator[Any]:
    """Starts a vLLM of a folder, as a pooling model."""
    started: list[VllmCluster] = []

    @asynccontextmanager
    async def start(folder: Path, http: aiohttp.ClientSession) -> AsyncIterator[VllmCluster]:
        started.append(cluster := VllmCluster(nats, etcd, folder, tmp_path))
        cluster.start_frontend()
        cluster.start_engine("--runner", "pooling")
        await cluster.ready(http)
        yield cluster

    yield start
    for each in started:
        each.end()


async def ask(
    http: aiohttp.ClientSession, cluster: VllmCluster, path: str, **body: Any
) -> dict[str, Any]:
    async with http.post(cluster.address + path, json={"model": "random"} | body) as answer:
        found: dict[str, Any] = await answer.json()
        assert answer.status == 200, found
        return found


async def test_embeddings_are_those_of_the_last_token(
    cluster: Any, model: Path, http: aiohttp.ClientSession
) -> None:
    import torch
    import transformers

    async with cluster(model, http) as served:
        found = await ask(http, served, "/v1/embeddings", input=TEXTS)
    vectors = [each["embedding"] for each in found["data"]]
    trunk = transformers.AutoModel.from_pretrained(model, dtype=torch.float32)
    for text, vector in zip(TEXTS, vectors, strict=True):
        with torch.no_grad():
            states = trunk(torch.tensor([token_ids(text)])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(states, dim=0).tolist()
        assert vector == pytest.approx(expected, abs=1e-3)


async def test_pairs_have_the_scores_of_the_cross_encoder(
    cluster: Any, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    import torch
    import transformers

    folder, query = write_cross_encoder(tmp_path / "cross-encoder"), "Where is the cat?"
    encoder = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    expected = []
    for text in TEXTS:
        first, second = token_ids(query), token_ids(text)
        types = torch.tensor([[0] * len(first) + [1] * len(second)])
        with torch.no_grad():
            logit = encoder(torch.tensor([first + second]), token_type_ids=types).logits.item()
        expected.append(1 / (1 + math.exp(-logit)))
    assert max(expected) - min(expected) > 0.01, "the scores say nothing"
    async with cluster(folder, http) as served:
        found = await ask(http, served, "/v1/score", text_1=query, text_2=TEXTS)
        assert [each["score"] for each in found["data"]] == pytest.approx(expected, abs=1e-3)
        found = await ask(http, served, "/v1/rerank", query=query, documents=TEXTS)
        order = sorted(range(len(TEXTS)), key=lambda index: -expected[index])
        assert [each["index"] for each in found["results"]] == order
