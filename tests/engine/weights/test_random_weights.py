"""Random weights: repeatable, shaped as a loaded model's, and sane at any depth."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tandem.engine.architecture.architectures import LLAMA, QWEN3
from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.rope_config import RopeConfig
from tandem.engine.weights.random_weights import random_weights
from tandem.engine.weights.weights import LayerWeights, ModelWeights

CPU = torch.device("cpu")


def config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "architecture": QWEN3, "hidden_size": 64, "intermediate_size": 160, "num_layers": 36,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "vocab_size": 512,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope": RopeConfig(10_000.0),
        "tie_word_embeddings": False, "eos_token_ids": (), "dtype": "float32",
    }  # fmt: skip
    return ModelConfig(**(fields | changes))


def every_tensor(weights: ModelWeights) -> list[torch.Tensor]:
    tensors = [weights.embedding, weights.final_norm, weights.lm_head]
    for layer in weights.layers:
        tensors += [getattr(layer, name) for name in LayerWeights.__slots__]
    return [tensor for tensor in tensors if tensor is not None]


def test_the_seed_decides_every_weight() -> None:
    shape = config(num_layers=2)
    one, same, other = (
        every_tensor(random_weights(shape, torch.bfloat16, CPU, seed)) for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_no_two_layers_are_alike() -> None:
    first, second = random_weights(config(num_layers=2), torch.float32, CPU).layers
    names = [name for name in LayerWeights.__slots__ if getattr(first, name) is not None]
    assert len(names) == 7
    for name in names:
        assert not torch.equal(getattr(first, name), getattr(second, name)), name


def test_heads_share_their_norm_as_those_of_a_checkpoint_do() -> None:
    qk_norm = random_weights(config(num_layers=1), torch.float32, CPU).layers[0].qk_norm
    assert qk_norm is not None
    assert torch.equal(qk_norm[:4], qk_norm[:1].expand(4, -1))
    assert torch.equal(qk_norm[4:], qk_norm[4:5].expand(2, -1))
    assert not torch.equal(qk_norm[0], qk_norm[4])


def test_tied_embeddings_and_llama_shapes_are_kept() -> None:
    shape = config(num_layers=1, tie_word_embeddings=True, architecture=LLAMA)
    weights = random_weights(shape, torch.float32, CPU)
    assert weights.lm_head is weights.embedding
    assert weights.layers[0].qk_norm is None


def state_dict(weights: ModelWeights) -> dict[str, torch.Tensor]:
    """As transformers names it, for the heads of `config()`."""
    tensors = {
        "model.embed_tokens": weights.embedding,
        "model.norm": weights.final_norm,
        "lm_head": weights.lm_head,
    }
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        q, k, v = torch.split(layer.qkv, [4 * 32, 2 * 32, 2 * 32])
        gate, up = layer.gate_up.chunk(2)
        assert layer.qk_norm is not None
        tensors |= {
            f"{prefix}.input_layernorm": layer.input_norm, f"{prefix}.self_attn.q_proj": q,
            f"{prefix}.self_attn.k_proj": k, f"{prefix}.self_attn.v_proj": v,
            f"{prefix}.self_attn.q_norm": layer.qk_norm[0],
            f"{prefix}.self_attn.k_norm": layer.qk_norm[4],
            f"{prefix}.self_attn.o_proj": layer.output,
            f"{prefix}.post_attention_layernorm": layer.post_norm, f"{prefix}.mlp.gate_proj": gate,
            f"{prefix}.mlp.up_proj": up, f"{prefix}.mlp.down_proj": layer.down,
        }  # fmt: skip
    return {f"{name}.weight": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_finite_and_spread_after_36_layers(dtype: torch.dtype) -> None:
    shape = config()
    model = Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab_size,
            tie_word_embeddings=False,
        )
    ).to(dtype)
    model.load_state_dict(state_dict(random_weights(shape, dtype, CPU)))
    tokens = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = model(tokens).logits.float()
    assert logits.isfinite().all()
    assert 2 < logits.std() < 8
    assert len(logits[:, -1].argmax(-1).unique()) == 2
