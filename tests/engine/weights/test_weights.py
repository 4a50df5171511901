"""Reading safetensors: every complaint names the file and the tensor."""

import json
import logging
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tandem.engine.architecture.architectures import LLAMA, QWEN2, QWEN3
from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.rope_config import RopeConfig
from tandem.engine.weights.checkpoint import INDEX_NAME
from tandem.engine.weights.weights import LayerWeights, ModelWeights, load_weights
from tandem.runtime.errors import ModelError
from tandem.runtime.process import progress

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 12, 20, 4, 2, 6, 31


def config(tied: bool = False) -> ModelConfig:
    return ModelConfig(
        architecture=QWEN3,
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


def shard(folder: Path, whole: dict[str, torch.Tensor], num_files: int, seed: int) -> None:
    """Tensors dealt to files at random, and the index that says where each is."""
    weight_map = {}
    names = random.Random(seed).sample(sorted(whole), len(whole))
    for number in range(num_files):
        part, file_name = names[number::num_files], f"part-{number}.safetensors"
        save_file({name: whole[name] for name in part}, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def plain_layer(stored: dict[str, torch.Tensor]) -> LayerWeights:
    """The layer put together tensor by tensor."""

    def of(*names: str) -> list[torch.Tensor]:
        return [stored[f"model.layers.0.{name}.weight"] for name in names]

    q_norm, k_norm = of("self_attn.q_norm", "self_attn.k_norm")
    return LayerWeights(
        input_norm=of("input_layernorm")[0],
        qkv=torch.cat(of("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        qk_norm=torch.stack([q_norm] * HEADS + [k_norm] * KV_HEADS),
        output=of("self_attn.o_proj")[0],
        post_norm=of("post_attention_layernorm")[0],
        gate_up=torch.cat(of("mlp.gate_proj", "mlp.up_proj")),
        down=of("mlp.down_proj")[0],
    )


def assert_same(weights: ModelWeights, stored: dict[str, torch.Tensor]) -> None:
    plain = plain_layer(stored)
    assert weights.layers[0].qkv_bias is None
    names = [name for name in LayerWeights.__slots__ if getattr(plain, name) is not None]
    assert len(names) == 7
    for name in names:
        assert torch.equal(getattr(weights.layers[0], name), getattr(plain, name)), name
    assert torch.equal(weights.embedding, stored["model.embed_tokens.weight"])
    assert torch.equal(weights.final_norm, stored["model.norm.weight"])
    assert torch.equal(weights.lm_head, stored["lm_head.weight"])


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    num_files=st.integers(1, 6),
    seed=st.integers(0, 1000),
    stored_as=st.lists(
        st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
        min_size=1,
        max_size=5,
    ),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_weights_are_those_of_a_plain_load(
    tmp_path_factory: pytest.TempPathFactory,
    num_files: int,
    seed: int,
    stored_as: list[torch.dtype],
    dtype: torch.dtype,
) -> None:
    folder = tmp_path_factory.mktemp("model")
    stored = {
        name: tensor.to(stored_as[index % len(stored_as)])
        for index, (name, tensor) in enumerate(tensors().items())
    }
    shard(folder, stored, num_files, seed)
    weights = load(folder, dtype=dtype)
    assert_same(weights, {name: tensor.to(dtype) for name, tensor in stored.items()})


def test_a_model_without_norms_of_heads_has_none(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    without = replace(config(), architecture=LLAMA)
    weights = load_weights(tmp_path, without, torch.float32, torch.device("cpu"))
    assert weights.layers[0].qk_norm is None


def test_biases_are_fused_as_their_projections_are(tmp_path: Path) -> None:
    sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
    prefix = "model.layers.0.self_attn"
    biases = {f"{prefix}.{p}_proj.bias": torch.randn(size) for p, size in sizes.items()}
    save_file(tensors() | biases, tmp_path / "model.safetensors")
    qwen2 = replace(config(), architecture=QWEN2)
    (layer,) = load_weights(tmp_path, qwen2, torch.float32, torch.device("cpu")).layers
    assert layer.qkv_bias is not None
    assert torch.equal(layer.qkv_bias, torch.cat(list(biases.values())))


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
    shard(tmp_path, whole, num_files=2, seed=0)
    assert_same(load(tmp_path), whole)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"part-1\.safetensors: missing"):
        load(tmp_path)


def test_a_shard_without_a_tensor_of_its_index_is_named(tmp_path: Path) -> None:
    whole = tensors()
    shard(tmp_path, whole, num_files=1, seed=0)
    del whole["lm_head.weight"]
    save_file(whole, tmp_path / "part-0.safetensors")
    with pytest.raises(ModelError, match=r"part-0\.safetensors.*lm_head\.weight") as caught:
        load(tmp_path)
    assert caught.value.param == "lm_head.weight"


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not valid JSON"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {"lm_head.weight": 7}}', "leaves the folder"),
        ('{"weight_map": {"lm_head.weight": "\\ud800"}}', "leaves the folder"),
        ('{"weight_map": {"lm_head.weight": "\\u0000"}}', "leaves the folder"),
        ("[" * 100_000, "not valid JSON"),
        ('{"weight_map": {"lm_head.weight": "../secret.safetensors"}}', "leaves the folder"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / INDEX_NAME).write_text(index)
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path)
    assert INDEX_NAME in caught.value.message


def test_without_an_index_the_files_that_belong_to_the_model_are_read(tmp_path: Path) -> None:
    """model.safetensors whatever lies beside it; of several others none is chosen."""
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    for name in ("consolidated.safetensors", "model_backup.safetensors", "zeros.safetensors"):
        zeros = {key: torch.zeros_like(each) for key, each in tensors().items()}
        save_file(zeros, tmp_path / name)
    kept = load(tmp_path).embedding
    assert bool(kept.any())
    path.unlink()
    with pytest.raises(ModelError, match=r"which of consolidated\.safetensors, model_backup") as no:
        load(tmp_path)
    assert INDEX_NAME in no.value.message
    for name in ("consolidated.safetensors", "zeros.safetensors"):
        (tmp_path / name).unlink()
    assert not load(tmp_path).embedding.any()


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


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn, torch.bool])
def test_integers_and_single_bytes_are_no_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = tensors() | {"model.norm.weight": torch.ones(HIDDEN).to(dtype)}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"model\.norm\.weight has dtype {dtype}"):
        load(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.0.self_attn.v_proj.weight", "lm_head.weight"]
)
def test_weights_that_are_not_finite_are_refused_by_name(
    tmp_path: Path, name: str, value: float
) -> None:
    stored = tensors()
    stored[name].view(-1)[-1] = value
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="finite") as caught:
        load(tmp_path)
    assert caught.value.param == name and name in caught.value.message


def test_weights_that_overflow_the_dtype_that_runs_are_refused_by_name(tmp_path: Path) -> None:
    stored = tensors()
    stored["model.norm.weight"][3] = 1e5
    save_file(stored, tmp_path / "model.safetensors")
    assert load(tmp_path).final_norm[3] == 1e5
    with pytest.raises(ModelError, match=r"float16, in model\.norm\.weight"):
        load(tmp_path, dtype=torch.float16)


@pytest.mark.parametrize("cut", [None, 1, 500, 10**6], ids=["other", "by 1", "by 500", "empty"])
def test_a_folder_without_a_whole_file_is_refused(tmp_path: Path, cut: int | None) -> None:
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        load(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    path.write_bytes(path.read_bytes()[:-cut] if cut else b"not safetensors at all")
    with pytest.raises(ModelError, match=r"model\.safetensors: not a readable safetensors file"):
        load(tmp_path)


def test_tensors_that_the_config_does_not_ask_for_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = {f"model.layers.{layer}.mlp.experts.weight": torch.ones(1) for layer in range(1, 9)}
    harmless = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    tied = {"lm_head.weight": tensors()["model.embed_tokens.weight"]}
    save_file(tensors() | harmless | tied, tmp_path / "model.safetensors")
    load(tmp_path)
    load(tmp_path, tied=True)
    assert "does not ask for" not in caplog.text
    save_file(tensors() | harmless | others, tmp_path / "model.safetensors")
    load(tmp_path)
    [warning] = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert "does not ask for 8 tensors: model.layers.1.mlp.experts.weight, " in warning
    assert warning.endswith("model.layers.5.mlp.experts.weight, ...")


@pytest.mark.parametrize(("after_s", "shown"), [(0.0, True), (60.0, False)])
def test_a_load_that_takes_long_shows_its_progress_on_a_terminal(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    after_s: float,
    shown: bool,
) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", after_s)
    before = set(threading.enumerate())
    load(tmp_path)
    out, err = capfd.readouterr()
    assert out == ""
    assert ("weights" in err) == shown
    for thread in set(threading.enumerate()) - before:  # the bar's, which is told and not awaited
        thread.join(60)
        assert not thread.is_alive()
