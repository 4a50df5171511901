"""A number of ranks that cannot compute a model is refused with the reason."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.architecture.architectures import ARCHITECTURES
from tandem.engine.architecture.config import ModelConfig, load_model_config
from tandem.engine.architecture.mixture_config import MixtureConfig
from tandem.engine.architecture.quantization import Quantization
from tandem.engine.config import EngineConfig
from tandem.engine.execution.resolve import rank_devices, resolve
from tandem.engine.ranks.widths import check_width, num_segments
from tandem.kernels.reference.routing import Routing
from tandem.models.random_model import write_random_model
from tandem.runtime.errors import ConfigError
from tests.engine.ranks.running import config_of

GPU = {"tp": 2, "device": "cuda:0", "kernels": "triton", "tp_invariant": False}
ONE_ORDER = {"deterministic": True, "tp_invariant": True}
FLOAT8 = Quantization("float8", 128, rounds_inputs=True)
MIXTURE = MixtureConfig(4, 128, 0, Routing(2), (True,) * 2)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_random_model(tmp_path, num_heads=8, num_kv_heads=4)


def resolved(model: Path, tp: int = 1, **settings: Any) -> tuple[EngineConfig, ModelConfig]:
    return resolve(config_of(model, tp, **settings), load_model_config(model))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "segments"),
    [(14, 2, 2), (28, 4, 4), (12, 6, 2), (6, 3, 1), (9, 3, 1), (16, 2, 8), (8, 1, 8), (32, 16, 8)],
)
def test_sums_have_as_many_segments_as_heads_can_be_dealt(
    model: Path, num_heads: int, num_kv_heads: int, segments: int
) -> None:
    """Ranks have as many heads each, of one KV head where these are fewer than ranks."""
    config, found = resolved(model)
    found = replace(found, num_heads=num_heads, num_kv_heads=num_kv_heads)
    assert num_segments(config, found) == segments


@pytest.mark.parametrize(
    ("settings", "changes", "reason"),
    [
        ({"tp": 3}, {}, "8 heads, 4 KV heads and a width of 128 in units of 2 is served by 1, 2, "),
        ({"tp": 4}, {"num_kv_heads": 6, "num_heads": 12}, "is served by 1, 2 processes"),
        ({"tp": 4}, {"quantization": Quantization("awq", 64)}, "in units of 64 is served by 1, 2"),
        ({"tp": 2}, {"quantization": Quantization("awq"), "head_dim": 20}, "heads of 20 numbers"),
        (GPU | {"kernels": "torch"}, {}, 'the kernels in Triton, not "torch"'),
        (GPU | {"tp_invariant": True}, {}, "engine.tp_invariant needs engine.deterministic"),
        (
            GPU | ONE_ORDER,
            {"quantization": Quantization("awq")},
            "of quantized weights sums run in",
        ),
        (GPU, {"quantization": FLOAT8}, "leave engine.float8_products off"),
        (GPU, {"quantization": Quantization("awq"), "head_dim": 24}, "heads of 24 numbers"),
        (GPU | ONE_ORDER, {"mixture": MIXTURE}, "of experts sums run in the order of tp"),
        ({"tp": 2, "kernels": "torch"}, {}, 'needs the kernels in C, not "torch"'),
        ({"tp": 2, "emulate": "h100/llama-3.1-8b"}, {}, "an emulated device is one"),
        ({"tp": 2}, {"dtype": "float16"}, "set engine.dtype to float32"),
        ({"tp": 2}, {"intermediate_size": 77}, "width of 77"),
        ({"tp": 2}, {"architecture": ARCHITECTURES["Olmo2ForCausalLM"]}, "over all heads at once"),
    ],
)
def test_a_width_that_is_not_served_is_refused_by_name(
    model: Path,
    settings: dict[str, Any],
    changes: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    config, found = resolved(model)
    with pytest.raises(ConfigError, match=f"tp {settings['tp']}: ") as caught:
        check_width(config.model_copy(update=settings), replace(found, **changes))
    assert reason in caught.value.message and caught.value.param == "tp"


def test_experts_too_narrow_for_their_groups_of_inputs_are_refused(model: Path) -> None:
    config, found = resolved(model)
    mixture = MixtureConfig(4, 128, 0, Routing(2), (True,) * found.num_layers)
    found = replace(
        found,
        architecture=ARCHITECTURES["MixtralForCausalLM"],
        mixture=mixture,
        quantization=Quantization("awq", 64),
    )
    check_width(config.model_copy(update={"tp": 2}), found)
    with pytest.raises(ConfigError, match="a width of 128 in units of 64 is served by 1, 2 proc"):
        check_width(config.model_copy(update={"tp": 4}), found)


def test_widths_with_the_order_of_sums_of_all_share_a_form_of_kv(model: Path) -> None:
    forms = {
        (tp, invariant): resolved(model, tp=tp, tp_invariant=invariant)[1].kv_form
        for tp in (1, 2, 4)
        for invariant in (True, False)
    }
    assert forms[1, True] == forms[2, True] == forms[4, True]
    assert len(set(forms.values())) == 4


def test_ranks_on_gpus_need_nccl(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, found = resolved(model)
    for has_nccl in (True, False):
        monkeypatch.setattr("torch.distributed.is_nccl_available", lambda has=has_nccl: has)
        if has_nccl:
            check_width(config.model_copy(update=GPU), found)
            assert num_segments(config.model_copy(update=GPU), found) == 2
        else:
            with pytest.raises(ConfigError, match="no NCCL"):
                check_width(config.model_copy(update=GPU), found)


@pytest.mark.parametrize(
    ("named", "first", "tp", "found"),
    [
        ("auto", "cuda:0", 4, [0, 1, 2, 3]),
        ("cuda:1", "cuda:1", 2, [1, 2]),
        ("cuda:3,0", "cuda:3", 2, [3, 0]),
        ("cuda:2", "cuda:2", 4, "takes GPUs 2, 3, 4, 5, and this process has 4: name others"),
        ("cuda:0,1,2", "cuda:0", 2, "a model of 2 ranks needs as many GPUs, each named once"),
        ("cuda:0,0", "cuda:0", 2, "a model of 2 ranks needs as many GPUs, each named once"),
    ],
)
def test_every_rank_has_a_gpu(
    named: str, first: str, tp: int, found: list[int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    config = EngineConfig(device=first, tp=tp)
    if isinstance(found, list):
        assert rank_devices(named, config) == [f"cuda:{index}" for index in found]
    else:
        with pytest.raises(ConfigError, match=found):
            rank_devices(named, config)
