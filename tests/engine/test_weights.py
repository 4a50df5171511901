"""Reading safetensors: every complaint names the file and the tensor."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.engine.model_config import ModelConfig, RopeConfig
from tandem.engine.weights import INDEX_NAME, ModelWeights, load_weights
from tandem.runtime.errors import ModelError

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 12, 20, 4, 2, 6, 31


def config(tied: bool = False) -> ModelConfig:
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_layers=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope=RopeConfig(10_000.0),
        qk_norm=True,
        tie_word_embeddings=tied,
        eos_token_ids=(),
        dtype="float32",
    )


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens": (VOCAB, HIDDEN),
        "model.norm": (HIDDEN,),
        "lm_head": (VOCAB, HIDDEN),
        "model.layers.0.input_layernorm": (HIDDEN,),
        "model.layers.0.post_attention_layernorm": (HIDDEN,),
        "model.layers.0.self_attn.q_proj": (HEADS * DIM, HIDDEN),
        "model.layers.0.self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
        "model.layers.0.self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
        "model.layers.0.self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "model.layers.0.self_attn.q_norm": (DIM,),
        "model.layers.0.self_attn.k_norm": (DIM,),
        "model.layers.0.mlp.gate_proj": (INNER, HIDDEN),
        "model.layers.0.mlp.up_proj": (INNER, HIDDEN),
        "model.layers.0.mlp.down_proj": (HIDDEN, INNER),
    }
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def load(folder: Path, tied: bool = False, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(folder, config(tied), dtype, torch.device("cpu"))


def test_projections_are_fused_in_the_order_of_their_names(tmp_path: Path) -> None:
    stored = tensors()
    save_file(stored, tmp_path / "model.safetensors")
    layer = load(tmp_path).layers[0]
    attn, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    assert torch.equal(layer.qkv, torch.cat([stored[f"{attn}.{p}_proj.weight"] for p in "qkv"]))
    assert torch.equal(
        layer.gate_up, torch.cat([stored[f"{mlp}.{p}_proj.weight"] for p in ("gate", "up")])
    )
    assert torch.equal(layer.output, stored[f"{attn}.o_proj.weight"])
    assert layer.qk_norm is not None
    assert torch.equal(layer.qk_norm[HEADS - 1], stored[f"{attn}.q_norm.weight"])
    assert torch.equal(layer.qk_norm[HEADS], stored[f"{attn}.k_norm.weight"])


@pytest.mark.parametrize("stored_as", [torch.bfloat16, torch.float16])
def test_weights_are_cast_to_the_dtype_that_runs(tmp_path: Path, stored_as: torch.dtype) -> None:
    stored = {name: tensor.to(stored_as) for name, tensor in tensors().items()}
    save_file(stored, tmp_path / "model.safetensors")
    weights = load(tmp_path)
    assert weights.embedding.dtype == weights.layers[0].qkv.dtype == torch.float32
    assert torch.equal(weights.lm_head, stored["lm_head.weight"].float())


def test_tied_embeddings_share_memory_and_need_no_lm_head(tmp_path: Path) -> None:
    stored = tensors()
    del stored["lm_head.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    weights = load(tmp_path, tied=True)
    assert weights.lm_head is weights.embedding
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load(tmp_path)


def test_weights_outlive_their_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    weights = load(tmp_path)
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(weights.final_norm, tensors()["model.norm.weight"])


def test_shards_are_found_through_their_index(tmp_path: Path) -> None:
    whole = tensors()
    names = sorted(whole)
    weight_map = {}
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: whole[name] for name in part}, tmp_path / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load(tmp_path).embedding, whole["model.embed_tokens.weight"])
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"part-1\.safetensors: missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "no readable weight_map"),
        ('{"weight_map": []}', "no readable weight_map"),
        ('{"weight_map": {"lm_head.weight": "../secret.safetensors"}}', "leaves the folder"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / INDEX_NAME).write_text(index)
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path)
    assert INDEX_NAME in caught.value.message


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    stored = tensors()
    del stored["model.layers.0.mlp.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert caught.value.param == "model.layers.0.mlp.up_proj.weight"
    assert str(tmp_path) in caught.value.message


def test_a_shape_that_differs_from_the_config_is_named_with_both(tmp_path: Path) -> None:
    stored = tensors() | {"model.norm.weight": torch.ones(HIDDEN + 1)}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"model\.safetensors: tensor model\.norm\.weight .*\[13\].*\[12\]"
    ):
        load(tmp_path)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    stored = tensors() | {"model.norm.weight": torch.ones(HIDDEN, dtype=torch.int8)}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight has dtype torch\.int8"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors: not a readable safetensors file"):
        load(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        load(tmp_path)
