"""A small random model, and one vLLM that serves it behind a frontend, for all tests here."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from tandem.models.random_model import write_random_model
from tests.services import EtcdServer, NatsServer
from tests.vllm.vllm_cluster import PATIENCE_S, VllmCluster


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers; vLLM's attention takes heads of 64 dimensions."""
    folder = tmp_path_factory.mktemp("model") / "random-qwen3"
    return write_random_model(folder, hidden_size=128, head_dim=64, intermediate_size=256)


@pytest.fixture(scope="session")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter that changes the values of the model's first layer."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("adapter")
    shape = json.loads((model / "config.json").read_text())
    name = "base_model.model.model.layers.0.self_attn.v_proj.lora_{}.weight"
    num_outputs = shape["num_key_value_heads"] * shape["head_dim"]
    torch.manual_seed(0)
    factors = {"A": torch.randn(8, shape["hidden_size"]), "B": torch.randn(num_outputs, 8)}
    save_file({name.format(k): v for k, v in factors.items()}, folder / "adapter_model.safetensors")
    config = {"r": 8, "lora_alpha": 8, "target_modules": ["v_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def adapted(
    nats: NatsServer,
    etcd: EtcdServer,
    model: Path,
    adapter: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VllmCluster]:
    """A frontend and one vLLM, which has an adapter."""
    cluster = VllmCluster(nats, etcd, model, tmp_path_factory.mktemp("logs"))
    cluster.start_frontend()
    cluster.start_engine("--lora-modules", f"adapted={adapter}")
    yield cluster
    cluster.end()


@pytest.fixture
async def served(adapted: VllmCluster, http: aiohttp.ClientSession) -> VllmCluster:
    """The frontend and the vLLM, once they answer."""
    await adapted.ready(http)
    return adapted


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session:
        yield session
