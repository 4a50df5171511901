import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from tandem.models.random_model import PRESETS, main, write_random_model
from tandem.runtime.errors import ModelError

transformers_logging.disable_progress_bar()

TEXT = "Grüße aus Zürich, 日本語 🙂 and plain ASCII"


def load(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_bytes", [None, 60_000])
def test_transformers_loads_every_weight(
    tmp_path: Path, architecture: str, tied: bool, max_shard_bytes: int | None
) -> None:
    path = write_random_model(
        tmp_path,
        architecture=architecture,
        tie_word_embeddings=tied,
        max_shard_bytes=max_shard_bytes,
    )
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert type(model).__name__.lower().startswith(architecture)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    is_tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert is_tied == tied


def test_shards_respect_their_limit_and_the_index_names_every_tensor(tmp_path: Path) -> None:
    max_shard_bytes = 140_000
    path = write_random_model(tmp_path, max_shard_bytes=max_shard_bytes)
    files = sorted(file.name for file in path.glob("*.safetensors"))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert len(files) > 1
    assert set(index["weight_map"].values()) == set(files)
    header_bytes = 8_192
    assert all((path / f).stat().st_size <= max_shard_bytes + header_bytes for f in files)


def test_sharding_does_not_change_the_weights(tmp_path: Path) -> None:
    whole = load(write_random_model(tmp_path / "whole")).state_dict()
    parts = load(write_random_model(tmp_path / "parts", max_shard_bytes=50_000)).state_dict()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_the_seed_decides_every_file(tmp_path: Path) -> None:
    def digests(path: Path) -> dict[str, str]:
        return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in path.iterdir()}

    first = digests(write_random_model(tmp_path / "a", seed=7))
    assert digests(write_random_model(tmp_path / "b", seed=7)) == first
    assert digests(write_random_model(tmp_path / "c", seed=8)) != first


@pytest.mark.parametrize("vocab_size", [259, 512, 1000])
def test_the_tokenizer_covers_the_vocabulary_and_any_text(tmp_path: Path, vocab_size: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_random_model(tmp_path, vocab_size=vocab_size))
    assert len(tokenizer) == vocab_size
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    assert all(tokenizer.convert_ids_to_tokens(i) is not None for i in range(vocab_size))


def test_the_chat_template_is_chatml(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_random_model(tmp_path))
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_greedy_answers_depend_on_the_prompt_and_have_no_ties(
    tmp_path: Path, architecture: str
) -> None:
    model = load(write_random_model(tmp_path, architecture=architecture))
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 256, (8, 24), generator=generator)
    prompts[:, -1] = 65  # the last token alone must not decide what comes next
    with torch.inference_mode():
        best = model(prompts).logits[:, -1].topk(2)
    assert len(set(best.indices[:, 0].tolist())) >= 6
    assert (best.values[:, 0] - best.values[:, 1]).min() > 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_written_as_such(tmp_path: Path, dtype: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_random_model(tmp_path, dtype=dtype))
    assert model.dtype == getattr(torch, dtype)


def test_llama_3_rope_scaling_reaches_the_config(tmp_path: Path) -> None:
    scaling = PRESETS["llama-3.2-1b"].rope_scaling
    path = write_random_model(
        tmp_path, architecture="llama", rope_scaling=scaling, max_position_embeddings=65_536
    )
    assert load(path).config.rope_parameters["rope_type"] == "llama3"


def test_the_command_line_takes_a_preset_and_replaces_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    main([str(out), "--preset", "near-zero", "--num-layers", "2", "--no-tie-word-embeddings"])
    assert capsys.readouterr().out.strip() == str(out)
    config = json.loads((out / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (32, 2)
    assert config["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("field", "value"),
    [("architecture", "gpt2"), ("dtype", "int8"), ("vocab_size", 200), ("num_kv_heads", 3)],
)
def test_an_impossible_shape_is_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(ModelError, match=r"architecture|dtype|vocab_size|KV heads"):
        write_random_model(tmp_path, **{field: value})  # type: ignore[arg-type]
