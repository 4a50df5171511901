"""An engine without a model: known tokens at a settable speed, to try out a cluster.

    python -m tandem.sdk.sample_engine --model-name test-model

The id of each token is one more than that of the token before it. The prompt determines the
answer, also that of an answer which another worker resumes. With `--endpoint-types
embeddings,rerank` it makes vectors of hashed pairs of tokens.
"""

import argparse
import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from tandem.sdk.engine.disaggregation import DisaggregationMode, enforce_prefill_max_tokens
from tandem.sdk.engine.health_check import build_health_check_payload
from tandem.sdk.engine.llm_engine import LLMEngine
from tandem.sdk.engine.metrics import SnapshotPublisher
from tandem.sdk.engine.types import (
    CompletionUsage,
    ComponentSnapshot,
    EngineConfig,
    GenerateChunk,
    GenerateRequest,
    VectorRequest,
)
from tandem.sdk.engine.worker_config import WorkerConfig
from tandem.sdk.engine_worker.run import run
from tandem.sdk.worker.context import Context

BUNDLED_MODEL = "tandem-tiny"  # its tokenizer and chat template are in the package
VOCAB_SIZE = 2048  # of the bundled tokenizer
FIRST_TOKEN_ID = 3  # those below are the bundled tokenizer's special tokens
BLOCK_SIZE = 16
NUM_BLOCKS = 4096  # or as many as a context has
DIMENSIONS = 64  # of its vectors, where a request names none
_MAX_SLEEP_S = 0.05  # between two checks that the caller is still there


def next_token(token_id: int, vocab_size: int = VOCAB_SIZE) -> int:
    """Return the token that this engine generates after `token_id`; never a special token."""
    following = token_id + 1
    return following if FIRST_TOKEN_ID <= following < vocab_size else FIRST_TOKEN_ID


def expected_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    """Return the whole answer to a prompt."""
    token_ids: list[int] = []
    last = prompt[-1] if prompt else 0
    for _ in range(num_tokens):
        last = next_token(last)
        token_ids.append(last)
    return token_ids


def hashed_vector(token_ids: Sequence[int], num_dimensions: int = DIMENSIONS) -> list[float]:
    """Return a vector of length 1: texts with the same tokens, and pairs of them, are near."""
    vector = [0.0] * num_dimensions
    grams = [(each,) for each in token_ids] + list(pairwise(token_ids))
    for gram in grams:
        place = hash(gram)  # of integers, so the same in every process
        vector[place % num_dimensions] += 1.0 if place & 1 << 20 else -1.0
    length = math.hypot(*vector) or 1.0
    return [number / length for number in vector]


@dataclass(frozen=True)
class SampleOptions:
    """The speed of the engine, the length of its answers, and its model's name."""

    model_name: str = "sample-model"
    model_path: str = BUNDLED_MODEL  # the frontend uses its tokenizer
    max_tokens: int = 16  # of requests without a limit
    token_interval_s: float = 0.01
    ttft_s: float = 0.0  # in addition, before the first token
    vocab_size: int = VOCAB_SIZE
    context_length: int = 8192
    mode: DisaggregationMode = DisaggregationMode.AGGREGATED


class SampleEngine(LLMEngine):
    """An engine that counts up from the prompt's last token."""

    def __init__(self, options: SampleOptions | None = None) -> None:
        self.options = options or SampleOptions()
        self._num_blocks = max(NUM_BLOCKS, -(-self.options.context_length // BLOCK_SIZE))
        self._num_running = 0
        self._num_used_blocks = 0
        self._snapshots: SnapshotPublisher | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        """Parse the flags; `--help` lists them."""
        arguments = _parser().parse_args(argv)
        mode = DisaggregationMode(arguments.disaggregation_mode)
        options = SampleOptions(
            model_name=arguments.model_name,
            model_path=arguments.model_path,
            max_tokens=arguments.max_tokens,
            token_interval_s=arguments.token_interval_ms / 1e3,
            ttft_s=arguments.ttft_ms / 1e3,
            vocab_size=arguments.vocab_size,
            context_length=arguments.context_length,
            mode=mode,
        )
        config = WorkerConfig(
            namespace=arguments.namespace,
            component=arguments.component,
            endpoint=arguments.endpoint,
            model_name=arguments.model_path,
            served_model_name=arguments.model_name,
            endpoint_types=arguments.endpoint_types,
            disaggregation_mode=mode,
        )
        return cls(options), config

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(
            model=self.options.model_path,
            served_model_name=self.options.model_name,
            context_length=self.options.context_length,
            kv_cache_block_size=BLOCK_SIZE,
            total_kv_blocks=self._num_blocks,
            max_num_seqs=1024,
            max_num_batched_tokens=self.options.context_length,
        )

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[GenerateChunk, None]:
        if self.options.mode is DisaggregationMode.PREFILL:
            enforce_prefill_max_tokens(request)
        prompt = request["token_ids"]
        num_blocks = len(prompt) // BLOCK_SIZE + 1
        self._hold(1, num_blocks)
        try:
            async for chunk in self._count_on(request, context):
                yield chunk
        finally:
            self._hold(-1, -num_blocks)

    async def _count_on(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[GenerateChunk, None]:
        prompt, options = request["token_ids"], self.options
        stop = request.get("stop_conditions") or {}
        max_tokens = stop.get("max_tokens") or options.max_tokens
        stop_token_ids = set(stop.get("stop_token_ids") or ())
        num_alternatives = (request.get("output_options") or {}).get("logprobs")
        token_id = prompt[-1] if prompt else 0
        await _pause(options.ttft_s, context)
        for index in range(max_tokens):
            await _pause(options.token_interval_s, context)
            if context.is_stopped():
                yield _last("cancelled", prompt, index)
                return
            token_id = next_token(token_id, options.vocab_size)
            if token_id in stop_token_ids and index >= (stop.get("min_tokens") or 0):
                ended = _last("stop", prompt, index)
                ended["stop_reason"] = token_id
                yield ended
                return
            chunk: GenerateChunk = {"token_ids": [token_id], "index": 0}
            if num_alternatives is not None:
                _add_logprobs(chunk, token_id, num_alternatives, options.vocab_size)
            if index + 1 == max_tokens:
                chunk["finish_reason"] = "length"
                chunk["completion_usage"] = _usage(prompt, max_tokens)
                if options.mode is DisaggregationMode.PREFILL:
                    chunk["disaggregated_params"] = {"first_token": token_id}
            yield chunk

    async def embed(self, request: VectorRequest, context: Context) -> list[list[float]]:
        num_dimensions = request.get("dimensions") or DIMENSIONS
        return [hashed_vector(each, num_dimensions) for each in request["token_ids"]]

    async def score(self, request: VectorRequest, context: Context) -> list[float]:
        scores = []
        for pair, start in zip(request["token_ids"], request["second_starts"], strict=True):
            query, document = hashed_vector(pair[:start]), hashed_vector(pair[start:])
            scores.append(sum(map(math.prod, zip(query, document, strict=True))))
        return scores

    async def is_quiescent(self) -> bool | None:
        return self._num_running == 0

    async def cleanup(self) -> None:
        self._snapshots = None

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: SnapshotPublisher) -> None:
        self._snapshots = publisher

    async def health_check_payload(self) -> dict[str, Any] | None:
        return build_health_check_payload(FIRST_TOKEN_ID)

    def _hold(self, num_requests: int, num_blocks: int) -> None:
        self._num_running += num_requests
        self._num_used_blocks += num_blocks
        if self._snapshots is not None:
            used, total = self._num_used_blocks, self._num_blocks
            self._snapshots.publish(0, ComponentSnapshot(used, total, used / total, 0))


async def _pause(duration_s: float, context: Context) -> None:
    """Sleep for `duration_s`; end early when the request is stopped."""
    while duration_s > 0 and not context.is_stopped():
        await asyncio.sleep(min(duration_s, _MAX_SLEEP_S))
        duration_s -= _MAX_SLEEP_S


def _usage(prompt: list[int], num_tokens: int) -> CompletionUsage:
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": num_tokens,
        "total_tokens": len(prompt) + num_tokens,
    }


def _last(finish_reason: str, prompt: list[int], num_tokens: int) -> GenerateChunk:
    return {
        "token_ids": [],
        "index": 0,
        "finish_reason": finish_reason,
        "completion_usage": _usage(prompt, num_tokens),
    }


def _add_logprobs(
    chunk: GenerateChunk, token_id: int, num_alternatives: int, vocab_size: int
) -> None:
    """Give the chosen token a logprob of -0.1, and each further alternative 0.1 less."""
    chunk["log_probs"] = [-0.1]
    best: list[dict[str, Any]] = []
    for rank in range(1, num_alternatives + 1):
        best.append({"rank": rank, "token_id": token_id, "logprob": -0.1 * rank})
        token_id = next_token(token_id, vocab_size)
    if best:
        chunk["top_logprobs"] = [best]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sample-engine", description="Known tokens, no model.")
    add, modes = parser.add_argument, [mode.value for mode in DisaggregationMode]
    add("--model-name", default="sample-model", help="the name of the model for clients")
    add(
        "--model-path",
        default=BUNDLED_MODEL,
        help="the model with the tokenizer (default %(default)s)",
    )
    add("--max-tokens", type=int, default=16, help="for requests without a limit")
    add("--token-interval-ms", type=float, default=10.0, help="between tokens")
    add("--ttft-ms", type=float, default=0.0, help="in addition, before the first token")
    add("--vocab-size", type=int, default=VOCAB_SIZE, help="all token ids are below this")
    add("--context-length", type=int, default=8192, help="the most tokens of a request")
    add("--namespace", default="dynamo")
    add("--component", default="backend")
    add("--endpoint", default="generate")
    add("--endpoint-types", default="chat,completions")
    add("--disaggregation-mode", choices=modes, default=DisaggregationMode.AGGREGATED.value)
    return parser


if __name__ == "__main__":
    run(SampleEngine)
