"""Models of other kinds than the one of all tests: two layers with random weights, made here."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem.models.folder import byte_level_tokenizer, write_generation_config, write_tokenizer
from tests.services import EtcdServer, NatsServer
from tests.vllm.vllm_cluster import ARGUMENTS, NEEDS_VLLM, VllmCluster, random_prompt

pytestmark = NEEDS_VLLM
WINDOW = 64
SHAPE = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "initializer_range": 0.15,
}  # fmt: skip
# Kind |-> the class of its configuration in transformers, and the fields that SHAPE lacks
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    ),
    "sliding": (
        "Gemma2Config",
        {"tie_word_embeddings": True, "sliding_window": WINDOW, "query_pre_attn_scalar": 64,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
}  # fmt: skip
# Kind |-> in addition, the refusal, and the arguments of the engine
LAYER = "layers.0.self_attn.attn: layers of {} have no handoffs"
REFUSED: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "windows_in_all_layers": (
        "MistralConfig", {"sliding_window": WINDOW}, LAYER.format("SlidingWindowSpec"), (),
    ),
    "mla": (
        "DeepseekV2Config",
        {"num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": None,
         "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64,
         "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 128},
        LAYER.format("MLAAttentionSpec"), (),
    ),
    "two_stages": (
        "Qwen3Config", {}, "pipeline_parallel_size: is 2; handoffs have tensor parallelism alone",
        ("--pipeline-parallel-size", "2"),
    ),
}  # fmt: skip


def write_model(folder: Path, config_class: str, fields: dict[str, Any]) -> Path:
    import torch
    import transformers

    tokenizer = byte_level_tokenizer(SHAPE["vocab_size"])
    config = getattr(transformers, config_class)(**SHAPE | fields, bos_token_id=None,
                                                 eos_token_id=258, pad_token_id=None)  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith("_layernorm.weight"):  # layers outweigh the tied embedding of the token
            torch.nn.init.constant_(weight, 4.0)
    model.save_pretrained(folder)
    write_tokenizer(folder, tokenizer, max_length_tokens=SHAPE["max_position_embeddings"])
    write_generation_config(folder, tokenizer)
    return folder


@pytest.fixture
def cluster(nats: NatsServer, etcd: EtcdServer, tmp_path: Path, kind: str) -> Iterator[VllmCluster]:
    cluster = VllmCluster(nats, etcd, write_model(tmp_path / kind, *SERVED[kind]), tmp_path)
    cluster.start_frontend()
    cluster.start_pair()
    yield cluster
    cluster.end()


@pytest.mark.parametrize("kind", SERVED)
async def test_a_model_of_another_kind_answers_as_an_unsplit_vllm(
    cluster: VllmCluster, http: aiohttp.ClientSession
) -> None:
    await cluster.ready(http)
    await cluster.prefill_ready()
    end, answers = random_prompt(WINDOW // 2), set()
    for num_tokens in (70, 128, 129, 300, 1000):
        prompt = random_prompt(num_tokens - len(end)) + end
        for sampling in ({}, {"temperature": 1.0, "seed": num_tokens}):
            remote, headers = await cluster.ask(http, prompt, "remote", **sampling)
            assert headers["x-tandem-prefill"] == "remote", headers["x-tandem-prefill-reason"]
            assert remote == await cluster.complete(http, prompt, "local", **sampling)
            answers.add(remote)
    assert len(answers) > 5, "the model ignores its KV: wrong KV would go unseen"


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_without_handoffs_is_refused_by_its_layer_or_its_ranks(
    tmp_path: Path, nats: NatsServer, etcd: EtcdServer, kind: str
) -> None:
    config_class, fields, refusal, arguments = REFUSED[kind]
    model = write_model(tmp_path / kind, config_class, fields)
    cluster = VllmCluster(nats, etcd, model, tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "tandem.launch", "engine", "vllm", str(model),
         "--disaggregation-mode", "decode", *ARGUMENTS, *arguments],
        env=cluster.environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert refusal in ended.stderr
