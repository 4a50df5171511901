"""Trunks of transformers as flat programs: where a trace is the same, and modules elsewhere."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from transformers import Qwen3Config, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from tandem.engine.transformers_models.generic_attention import INTERFACE, attend
from tandem.engine.transformers_models.generic_trace import flat_trunk

CONFIG: Any = SimpleNamespace(num_heads=2, head_dim=16)


def trunk() -> Qwen3Model:
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=None,
    )
    config._attn_implementation = INTERFACE
    torch.manual_seed(1)
    return Qwen3Model(config).eval().requires_grad_(False)


def is_flat(changed: Callable[[torch.Tensor], torch.Tensor] | None = None) -> bool:
    """Return whether a trunk is flat after a look at its results, with a change of a layer's."""
    model = trunk()
    if changed is not None:
        layer = model.layers[1]
        layer.forward = lambda *args, **named: changed(
            Qwen3DecoderLayer.forward(layer, *args, **named)
        )
    flat = flat_trunk(model, CONFIG, torch.device("cpu"))
    attend.set(lambda call, q, k, v: q + k * v)
    for length in (1, 6):
        token_ids = torch.randint(64, (1, length))
        positions = torch.arange(length)[None] + 9
        expected = model(input_ids=token_ids, position_ids=positions, use_cache=False)
        torch.testing.assert_close(flat(token_ids, positions), expected.last_hidden_state)
    return isinstance(getattr(flat, "__self__", None), fx.GraphModule)


def test_a_trunk_is_flat_for_any_number_of_tokens() -> None:
    assert is_flat()


@pytest.mark.parametrize(
    "changed",
    [
        lambda x: x * 2 if x.shape[1] > 4 else x,
        lambda x: x * 2 if x.sum() > 0 else x,
        lambda x: x * 2 if isinstance(x, torch.Tensor) else x,
    ],
    ids=["by shape", "by value", "by type"],
)
def test_a_trunk_with_branches_stays(changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert not is_flat(changed)
