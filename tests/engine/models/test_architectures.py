"""Every architecture of the native ring: the tokens and the logits of transformers' eager pass."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Sequence
from tandem.engine.step.sampler import SampledToken
from tandem.runtime.messages import SamplingParams, StopConditions
from tests.engine.models.tiny_models import make_model

NUM_TOKENS = 64
PROMPT_LENGTHS = (1, 7, 23, 48, 40)  # the last begins as the one before it does

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {"rope_scaling": YARN, "attention_bias": True},
    "mistral": {"sliding_window": 12},
    "ministral": {
        "sliding_window": 12,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "ministral3": {
        "rope_parameters": YARN
        | {"rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
    },
    "phi3": {
        "partial_rotary_factor": 0.75,
        "rope_scaling": LONGROPE,
        "original_max_position_embeddings": 32,
        "max_position_embeddings": 128,
        "sliding_window": 20,
    },
    "gemma2": {
        "sliding_window": 12,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
    },
    "gemma3_text": {
        "sliding_window": 12,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 20,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 12, "rope_scaling": YARN | {"attention_factor": 1.2}},
    "granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "mlp_bias": True,
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "glm": {},
    "glm4": {},
    "seed_oss": {"attention_out_bias": True, "mlp_bias": True},
    "exaone4": {"sliding_window": 12, "sliding_window_pattern": 3, "rope_scaling": LLAMA3},
}


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    made = [[rng.randrange(3, 512) for _ in range(length)] for length in PROMPT_LENGTHS]
    made[-1][:30] = made[-2][:30]
    return made


def sequence(index: int, prompt: list[int], *, prefill_only: bool = False) -> Sequence:
    return Sequence(
        f"r{index}",
        list(prompt),
        len(prompt),
        SamplingParams(temperature=0.0),
        StopConditions(max_tokens=NUM_TOKENS, ignore_eos=True),
        prefill_only=prefill_only,
    )


def make_engine(folder: Path, **options: Any) -> Engine:
    config = EngineConfig(
        model=str(folder), device="cpu", block_size=8, threads=1, num_blocks=200, **options
    )
    return Engine(config, ModelRunner(config))


def generate(engine: Engine) -> list[list[int]]:
    """Return prompt and answer of every prompt, computed together."""
    texts = {f"r{index}": list(prompt) for index, prompt in enumerate(prompts())}
    for index, prompt in enumerate(prompts()):
        engine.add(sequence(index, prompt))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            texts[output.request_id] += output.token_ids
        engine.check_invariants()
    return list(texts.values())


def generate_remotely(folder: Path) -> list[list[int]]:
    """Return what `generate` does, each prompt computed by one engine and answered by another."""
    prefill, decode = make_engine(folder, max_num_batched_tokens=48), make_engine(folder)
    texts = {f"r{index}": list(prompt) for index, prompt in enumerate(prompts())}
    for index, prompt in enumerate(prompts()):
        source, target = sequence(index, prompt, prefill_only=True), sequence(index, prompt)
        prefill.add(source)
        while prefill.has_work:
            outputs = prefill.step()
        reservation = decode.reserve(target)
        assert reservation is not None
        for ordinal, block_id in reservation.fill:
            sent = prefill.runner.kv_caches[0].tensor[source.block_table[ordinal]]
            decode.runner.kv_caches[0].tensor[block_id].copy_(sent)
        prefill.abort(source.request_id)
        first = SampledToken(outputs[0].token_ids[0], None)
        texts[target.request_id] += decode.admit(target.request_id, first).token_ids
    while decode.has_work:
        for output in decode.step():
            texts[output.request_id] += output.token_ids
    return list(texts.values())


def logits_of(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


def assert_greedy(model: PreTrainedModel, texts: list[list[int]]) -> None:
    """Assert that each token after a prompt is the likeliest by transformers."""
    for prompt, text in zip(prompts(), texts, strict=True):
        assert len(text) == len(prompt) + NUM_TOKENS
        assert (
            text[len(prompt) :] == logits_of(model, text)[len(prompt) - 1 : -1].argmax(-1).tolist()
        )


@pytest.mark.parametrize("model_type", CASES)
def test_an_architecture_computes_as_in_transformers(model_type: str, tmp_path: Path) -> None:
    """In ragged batches, in chunks, over a cached prefix, prefilled remotely; logits to 1e-5."""
    model = make_model(tmp_path, model_type, **CASES[model_type])
    engine = make_engine(tmp_path, max_num_batched_tokens=24, prefill_chunk_tokens=5)
    texts = generate(engine)
    assert_greedy(model, texts)
    assert len({token for text in texts for token in text[-NUM_TOKENS:]}) > NUM_TOKENS
    assert engine.prefix_hit(sequence(9, prompts()[3])) == 40
    assert generate(engine) == texts
    assert generate_remotely(tmp_path) == texts
    assert_same_logits(engine, model, texts[3])


def assert_same_logits(
    engine: Engine, model: PreTrainedModel, text: list[int], tolerance: float = 1e-5
) -> None:
    """Compare the logits of `text` computed in one go, its prefix not cached."""
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    seen: list[torch.Tensor] = []
    compute = runner._model.logits
    runner._model.logits = lambda hidden: seen.append(compute(hidden)) or seen[-1]  # type: ignore[method-assign,func-returns-value,return-value]
    fresh = [3, *text]  # no cached prefix
    for end in (20, 49, len(fresh)):
        engine.add(
            Sequence(
                f"to {end}",
                fresh[:end],
                end,
                SamplingParams(temperature=0.0),
                StopConditions(max_tokens=1),
            )
        )
        while engine.has_work:
            engine.step()
    theirs = logits_of(model, fresh)[[19, 48, -1]]
    torch.testing.assert_close(
        torch.cat(seen), theirs, rtol=0, atol=tolerance * max(1, theirs.std().item())
    )


@pytest.mark.parametrize(
    "is_old", [True, False], ids=["language_model.model", "model.language_model"]
)
@pytest.mark.parametrize(
    ("model_type", "wrapper"),
    [
        ("gemma3_text", "Gemma3ForConditionalGeneration"),
        ("mistral", "Mistral3ForConditionalGeneration"),
    ],
)
def test_the_text_part_of_a_model_of_several_media_is_served(
    model_type: str, wrapper: str, is_old: bool, tmp_path: Path
) -> None:
    """Its sizes are at text_config, its tensors under either of two names beside others."""
    model = make_model(tmp_path, model_type, **CASES[model_type])
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": [wrapper], "text_config": config}
    whole["tie_word_embeddings"] = config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    path = tmp_path / "model.safetensors"
    tensors = {"vision_tower.weight": torch.ones(3)}
    for name, tensor in load_file(path).items():
        new = name.replace("model.", "model.language_model.", 1)
        tensors[f"language_model.{name}" if is_old else new] = tensor
    save_file(tensors, path)
    assert_greedy(model, generate(make_engine(tmp_path)))
