"""The kinds of vLLM's models, and vectors and scores of some; without an import of vLLM."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from typing import Any


def num_labels(hf_config: object) -> int:
    """Return the number of a classifier's labels; 0 for any other model."""
    return int(getattr(hf_config, "num_labels", 0))


def endpoint_types(tasks: Collection[str], num_labels: int) -> list[str]:
    """Return the endpoints of a model with these of vLLM's tasks.

    A classifier with one label scores pairs; any other says nothing of relevance.
    """
    types = ["chat", "completions"] if "generate" in tasks else []
    if "embed" in tasks:
        types.append("embeddings")
    if "classify" in tasks and num_labels == 1:
        types.append("rerank")
    return types or ["chat", "completions"]


def sees_images(processor: Any) -> bool:
    """Return True for a model whose processor, None of one of text alone, takes images."""
    return processor is not None and processor.info.allowed_mm_limits.get("image", 0) > 0


def probe(types: Collection[str]) -> dict[str, Any]:
    """Return the fields of a health check for a model that makes vectors or scores."""
    kind = "embeddings" if "embeddings" in types else "rerank"
    return {"kind": kind, "token_ids": [[0]], "second_starts": [1]}


def type_fields(hf_config: object, second_starts: Sequence[int]) -> list[dict[str, int] | None]:
    """Return the `extra_kwargs` of each pair: where type 1 begins, if the model has types."""
    has_types = getattr(hf_config, "type_vocab_size", 0) > 1
    return [{"compressed_token_type_ids": start} if has_types else None for start in second_starts]


async def pooled(
    encode: Callable[..., Any], prompts: Sequence[Any], params: Sequence[Any], name: str
) -> list[list[float]]:
    """Return the vector of each prompt by `AsyncLLM.encode`. The first error cancels the others.

    Raise ExceptionGroup with vLLM's errors.
    """

    async def vector_of(index: int) -> list[float]:
        found: list[float] = []
        async with aclosing(encode(prompts[index], params[index], f"{name}-{index}")) as outputs:
            async for output in outputs:
                found = output.outputs.data.reshape(-1).tolist()
        return found

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(vector_of(index)) for index in range(len(prompts))]
    return [task.result() for task in tasks]
