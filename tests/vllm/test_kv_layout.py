"""vLLM's pool as records, and the engines that have no handoffs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.runtime.errors import ConfigError
from tandem.vllm.kv_layout import check_supported, layout_of, pool_of

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 3, 5, 2, 4, 8
PAGE_BYTES = HEADS * TOKENS * 2 * DIM * 4


class FullAttentionSpec(SimpleNamespace):
    """vLLM's spec of a layer; the connector knows it by its name."""


class MLAAttentionSpec(FullAttentionSpec):
    """A layer with one latent head."""


class SlidingWindowSpec(FullAttentionSpec):
    """A layer whose blocks vLLM drops outside of its window."""


def spec(kind: type[SimpleNamespace] = FullAttentionSpec, **changed: Any) -> SimpleNamespace:
    fields = {
        "num_kv_heads": HEADS, "head_size": DIM, "block_size": TOKENS, "dtype": torch.float32,
        "page_size_bytes": PAGE_BYTES, "non_causal": False,
    }  # fmt: skip
    return kind(**fields | changed)


def cache_config(layer: SimpleNamespace | None = None, groups: int = 1, **tensor: Any) -> Any:
    names = [f"layers.{i}" for i in range(LAYERS)]
    group = SimpleNamespace(layer_names=names, kv_cache_spec=layer or spec())
    fields = {
        "layers": names, "offset": 0, "block_stride": PAGE_BYTES,
        "layer_stride": PAGE_BYTES * BLOCKS,
    }  # fmt: skip
    place = SimpleNamespace(**fields | tensor)
    return SimpleNamespace(
        num_blocks=BLOCKS, kv_cache_groups=[group] * groups, kv_cache_tensors=[place]
    )


def vllm_config(*, speculative: object = None, policy: str = "recompute", **parallel: int) -> Any:
    transfer = SimpleNamespace(is_kv_consumer=True, kv_load_failure_policy=policy)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{"world_size": 1} | parallel),
        kv_transfer_config=transfer,
        speculative_config=speculative,
    )


def test_a_record_is_a_layer_of_a_block() -> None:
    memory = torch.arange(LAYERS * BLOCKS * PAGE_BYTES // 4, dtype=torch.float32)
    layers = memory.view(LAYERS, BLOCKS, HEADS, TOKENS, 2 * DIM)
    config = cache_config()
    pool = pool_of(config, {f"layers.{i}": layers[i] for i in range(LAYERS)})
    assert pool.block_bytes == layout_of(config).block_bytes == PAGE_BYTES
    assert pool.num_blocks == LAYERS * BLOCKS and pool.base_address == memory.data_ptr()
    table = pool.table([4, 1])
    assert len(table) == 2 * LAYERS and table[LAYERS + 2] == 2 * BLOCKS + 1
    record = pool.tensor[table[LAYERS + 2]].view(torch.float32)
    assert torch.equal(record, layers[2, 1].flatten())


def test_an_engine_of_full_attention_and_any_tensor_parallelism_is_supported() -> None:
    check_supported(vllm_config(tensor_parallel_size=2), cache_config())


def test_a_refused_layer_is_named() -> None:
    mixed = cache_config(groups=2)
    window = SimpleNamespace(layer_names=["layers.1"], kv_cache_spec=spec(SlidingWindowSpec))
    mixed.kv_cache_groups[1] = window
    with pytest.raises(ConfigError, match=r"layers\.1: layers of SlidingWindowSpec"):
        check_supported(vllm_config(), mixed)


@pytest.mark.parametrize(
    ("engine", "cache", "param"),
    [
        (vllm_config(policy="fail"), cache_config(), "kv_load_failure_policy"),
        (vllm_config(pipeline_parallel_size=2), cache_config(), "pipeline_parallel_size"),
        (vllm_config(speculative=object()), cache_config(), "speculative_config"),
        (vllm_config(), cache_config(groups=2), "kv_cache_groups"),
        (vllm_config(), cache_config(spec(SlidingWindowSpec)), "kv_cache_spec"),
        (vllm_config(), cache_config(spec(non_causal=True)), "non_causal"),
        (vllm_config(), cache_config(spec(MLAAttentionSpec)), "kv_cache_spec"),
        (vllm_config(), cache_config(spec(dtype=torch.float8_e4m3fn)), "kv_cache_dtype"),
        (vllm_config(), cache_config(spec(page_size_bytes=4096)), "kv_cache_dtype"),
        (vllm_config(), cache_config(block_stride=LAYERS * PAGE_BYTES), "kv_cache_layout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_engine_that_has_no_handoffs_is_refused_by_name(
    engine: Any, cache: Any, param: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_supported(engine, cache)
    assert caught.value.param == param and param in caught.value.message
