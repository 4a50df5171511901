"""OpenAI's embeddings, rerank in the shape of Jina and Cohere, and vLLM's score: an `Api` each."""

import asyncio
import math
import sys
import time
from array import array
from base64 import b64encode
from itertools import cycle
from operator import mul

import msgspec
from msgspec import Raw

from tandem.frontend.catalog.catalog import ModelRoute, TokenModel
from tandem.frontend.errors import OpenAIErrors
from tandem.frontend.generation.deps import FrontendDeps
from tandem.frontend.generation.plan import of_tokens
from tandem.frontend.http.api import Call, Work
from tandem.frontend.shapes.generations import Generations
from tandem.frontend.vectors.batches import VectorRun
from tandem.frontend.vectors.bodies import (
    Document,
    Embedding,
    EmbeddingList,
    EmbeddingsBody,
    RankedDocument,
    Ranking,
    RerankBody,
    Score,
    ScoreBody,
    ScoreList,
    VectorUsage,
    parse_embeddings,
    parse_rerank,
    parse_score,
)
from tandem.frontend.vectors.inputs import VectorInputs, pair_inputs, side_inputs, text_inputs
from tandem.runtime.wire.messages import VectorKind

_encode = msgspec.json.Encoder().encode


class _VectorApi:
    """Inputs to vectors, counted and charged as prompts are."""

    errors = OpenAIErrors()

    def __init__(self, generations: Generations, deps: FrontendDeps) -> None:
        self._generations = generations
        self._deps = deps

    def _model(self, name: str, route: ModelRoute, call: Call) -> TokenModel:
        return of_tokens(self._generations.model(name, route, call))

    def _run(
        self,
        kind: VectorKind,
        inputs: VectorInputs,
        dimensions: int | None,
        model: TokenModel,
        call: Call,
    ) -> VectorRun:
        if call.exchange.client is not None:
            call.charge = call.exchange.client.charge(inputs.num_tokens, 0)
        run = VectorRun(kind, inputs, dimensions, model, call, self._deps)
        call.record.summarize = run.summary
        return run


class EmbeddingsApi(_VectorApi):
    """POST /v1/embeddings."""

    async def prepare(self, raw: bytes, call: Call) -> Work:
        generations = self._generations
        longest = generations.longest_context
        body = parse_embeddings(raw, generations.config, longest, call.ignored)
        model = self._model(body.model, "embeddings", call)
        inputs = await text_inputs(
            body.inputs(generations.config),
            model,
            with_special=body.add_special_tokens is not False,
        )
        run = self._run("embeddings", inputs, body.dimensions, model, call)
        return _embed(run, body, inputs.num_tokens, call)


async def _embed(run: VectorRun, body: EmbeddingsBody, num_tokens: int, call: Call) -> None:
    data: list[Embedding] = []
    for index, vector in enumerate(await run.vectors()):
        data.append(Embedding(index, Raw(_shown(vector, body.encoding_format == "base64"))))
        await asyncio.sleep(0)  # streams go on between two vectors
    answer = EmbeddingList(body.model, data, VectorUsage(num_tokens, num_tokens))
    await _respond(answer, run, call)


def _shown(vector: "array[float]", in_base64: bool) -> bytes:
    """Return a vector as JSON: a list, or base64 of its little-endian float32."""
    if not in_base64:
        return _encode(vector.tolist())
    if sys.byteorder == "big":
        vector.byteswap()
    return b'"' + b64encode(vector) + b'"'


class RerankApi(_VectorApi):
    """POST /v1/rerank."""

    async def prepare(self, raw: bytes, call: Call) -> Work:
        body = parse_rerank(raw, self._generations.config, call.ignored)
        model = self._model(body.model, "rerank", call)
        pairs = [(body.query, text) for text in body.texts]
        inputs = await pair_inputs(pairs, model, ("query", "documents"))
        run = self._run("rerank", inputs, None, model, call)
        return _rank(run, body, inputs.num_tokens, call)


async def _rank(run: VectorRun, body: RerankBody, num_tokens: int, call: Call) -> None:
    scores = [vector[0] for vector in await run.vectors()]
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    texts = body.texts
    shows = body.return_documents is not False
    results = [
        RankedDocument(index, scores[index], Document(texts[index]) if shows else None)
        for index in ranked
    ]
    usage = VectorUsage(num_tokens, num_tokens)
    await _respond(Ranking(f"rerank-{call.context.id}", body.model, results, usage), run, call)


class ScoreApi(_VectorApi):
    """POST /v1/score."""

    async def prepare(self, raw: bytes, call: Call) -> Work:
        config = self._generations.config
        generations, config = self._generations, self._generations.config
        body = parse_score(raw, config, call.ignored)
        first, second = body.sides(config.max_inputs)
        if not generations.serves(body.model, "rerank") and generations.serves(
            body.model, "embeddings"
        ):
            model = self._model(body.model, "embeddings", call)
            inputs = await side_inputs(first, second, model, body.names)
            run = self._run("embeddings", inputs, None, model, call)
            return _score(run, body, inputs.num_tokens, call, num_first=len(first))
        model = self._model(body.model, "rerank", call)
        pairs = list(zip(cycle(first), second, strict=False))
        inputs = await pair_inputs(pairs, model, body.names)
        run = self._run("rerank", inputs, None, model, call)
        return _score(run, body, inputs.num_tokens, call)


async def _score(
    run: VectorRun, body: ScoreBody, num_tokens: int, call: Call, *, num_first: int = 0
) -> None:
    """Answer with the scores of pairs, or with the nearness of `num_first` texts to the others."""
    vectors = await run.vectors()
    scores = [vector[0] for vector in vectors]
    if num_first:
        scores = await _cosines(vectors[:num_first], vectors[num_first:])
    data = [Score(index, score) for index, score in enumerate(scores)]
    usage, created_s = VectorUsage(num_tokens, num_tokens), int(time.time())
    answer = ScoreList(f"score-{call.context.id}", created_s, body.model, data, usage)
    await _respond(answer, run, call)


async def _cosines(first: list["array[float]"], second: list["array[float]"]) -> list[float]:
    found = []
    for one, other in zip(cycle(first), second, strict=False):
        norms = math.hypot(*one) * math.hypot(*other)
        found.append(sum(map(mul, one, other)) / norms if norms else 0.0)
        await asyncio.sleep(0)  # streams go on between two pairs
    return found


async def _respond(answer: object, run: VectorRun, call: Call) -> None:
    headers = run.headers() + call.exchange.id_headers(call.context.id)
    await call.exchange.respond(200, _encode(answer), headers)
