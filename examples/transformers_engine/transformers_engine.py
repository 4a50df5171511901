"""A custom engine: `transformers` behind Tandem's frontend, on a CPU or a GPU.

    tandem serve                                                  # a cluster, in one terminal
    python transformers_engine.py --model tandem-tiny --model-name mine      # in another
    curl localhost:8000/v1/completions --json '{"model": "mine", "prompt": "Once upon a time"}'

Start it more than once to share the requests. Stop one in the middle of an answer, and another one
resumes it: the tokens generated so far become a part of the prompt, and a draw depends only on the
seed and the position.
"""

import argparse
import asyncio
import random
from collections.abc import AsyncGenerator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tandem.models.paths import resolve_model
from tandem.sdk import (
    Context,
    EngineConfig,
    GenerateChunk,
    GenerateRequest,
    LLMEngine,
    WorkerConfig,
    run,
)
from tandem.sdk.engine.health_check import build_health_check_payload


class TransformersEngine(LLMEngine):
    """An engine that runs one forward pass at a time, on a thread; requests take turns."""

    def __init__(self, model: str, model_name: str) -> None:
        self.folder = str(resolve_model(model))
        self.model_name = model_name
        self.turn = asyncio.Lock()
        self.model: Any = None
        self.end_ids: set[int] = set()

    @classmethod
    async def from_args(
        cls, argv: list[str] | None = None
    ) -> tuple["TransformersEngine", WorkerConfig]:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--model", default="tandem-tiny", help="a folder or a hub id")
        parser.add_argument(
            "--model-name", default="mine", help="the name of the model for clients"
        )
        arguments = parser.parse_args(argv)
        engine = cls(arguments.model, arguments.model_name)
        config = WorkerConfig(
            namespace="transformers",
            model_name=arguments.model,
            served_model_name=arguments.model_name,
        )
        return engine, config

    async def start(self, worker_id: int) -> EngineConfig:
        def load() -> Any:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
            return model.to(device).eval()

        self.model = await asyncio.to_thread(load)
        end_ids = self.model.generation_config.eos_token_id
        self.end_ids = set(end_ids) if isinstance(end_ids, list) else {end_ids}
        length = self.model.config.max_position_embeddings
        return EngineConfig(self.folder, self.model_name, context_length=length)

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[GenerateChunk, None]:
        stop = request.get("stop_conditions") or {}
        sampling = request.get("sampling_options") or {}
        max_tokens = stop.get("max_tokens") or 16
        end_ids = set(stop.get("stop_token_ids") or ())
        if not stop.get("ignore_eos"):
            end_ids |= self.end_ids
        seed = sampling.get("seed")
        seed = random.getrandbits(32) if seed is None else seed
        token_ids, cache = list(request["token_ids"]), DynamicCache()
        for index in range(max_tokens):
            if context.is_stopped():
                yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                return
            async with self.turn:
                logits = await asyncio.to_thread(self._forward, token_ids, cache)
            if index < (stop.get("min_tokens") or 0):
                logits[list(end_ids)] = -torch.inf
            token_id = self._choose(logits, sampling.get("temperature"), seed + len(token_ids))
            token_ids.append(token_id)
            chunk: GenerateChunk = {"token_ids": [token_id], "index": 0}
            if token_id in end_ids:
                chunk["finish_reason"], chunk["stop_reason"] = "stop", token_id
            elif index + 1 == max_tokens:
                chunk["finish_reason"] = "length"
            yield chunk
            if "finish_reason" in chunk:
                return

    async def health_check_payload(self) -> dict[str, Any] | None:
        return build_health_check_payload(min(self.end_ids))

    async def cleanup(self) -> None:
        self.model = None

    @torch.inference_mode()
    def _forward(self, token_ids: list[int], cache: DynamicCache) -> torch.Tensor:
        """Return the logits after the last token; `cache` already has the first tokens."""
        new = torch.tensor([token_ids[cache.get_seq_length() :]], device=self.model.device)
        output = self.model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1].float().cpu()
        return logits

    def _choose(self, logits: torch.Tensor, temperature: float | None, seed: int) -> int:
        if temperature == 0:
            return int(logits.argmax())
        weights = torch.softmax(logits / (temperature or 1.0), dim=-1)
        draw = torch.Generator().manual_seed(seed % 2**63)
        return int(torch.multinomial(weights, 1, generator=draw))


if __name__ == "__main__":
    run(TransformersEngine)
