"""Models that transformers' code computes: the tokens and logits of their own eager pass."""

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.stablelm.modeling_stablelm import StableLmAttention

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.decoder.kernel_set import Kernels, load_kernels
from tandem.engine.execution.model_code import choose_model_config
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Sequence
from tandem.engine.transformers_models import generic_model
from tandem.engine.transformers_models.generic_attention import pack_experts
from tandem.engine.transformers_models.generic_masks import Rule, is_window
from tandem.runtime.errors import ModelError
from tandem.runtime.wire.messages import SamplingParams, StopConditions
from tests.accuracy import judged_logits
from tests.engine.transformers_models.generic_architectures import (
    CALLED_AS_MODULES,
    EXPERTS,
    FUSED,
    QUICK,
    SIZES,
    SLOW,
)

NUM_TOKENS = 24
PROMPT_LENS = (1, 7, 30, 45)


def save(folder: Path, kind: str, values: dict[str, Any]) -> Any:
    """Write a random model; return it, with transformers' eager attention."""
    config = AutoConfig.for_model(kind, **(SIZES | values))
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    model.save_pretrained(folder)
    return model.eval()


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 128) for _ in range(length)] for length in PROMPT_LENS]


def make_engine(folder: Path, **options: Any) -> Engine:
    config = EngineConfig(
        model=str(folder),
        model_impl="transformers",
        device="cpu",
        threads=1,
        block_size=8,
        num_blocks=200,
        **options,
    )
    return Engine(config, ModelRunner(config))


def generate(engine: Engine) -> list[tuple[list[int], list[float]]]:
    """Return each prompt's greedy tokens and their log probabilities."""
    results: list[tuple[list[int], list[float]]] = []
    for index, prompt in enumerate(prompts()):
        results.append(([], []))
        sampling = SamplingParams(temperature=0.0, logprobs=0)
        stop = StopConditions(max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.add(Sequence(str(index), list(prompt), len(prompt), sampling, stop))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens, logprobs = results[int(output.request_id)]
            tokens.extend(output.token_ids)
            logprobs.extend(each.logprob for each in output.logprobs or ())
    return results


def check(model: Any, results: list[tuple[list[int], list[float]]]) -> None:
    """Compare with one eager pass over each prompt and its answer."""
    for prompt, (tokens, logprobs) in zip(prompts(), results, strict=True):
        assert len(tokens) == len(logprobs) == NUM_TOKENS
        judged = judged_logits(model, prompt + tokens)
        rows = slice(len(prompt) - 1, -1)
        judged.assert_likeliest(tokens, rows)
        best = judged.each(lambda logits: logits.log_softmax(-1).amax(-1))
        best.assert_near(torch.tensor(logprobs), rows)


def cases() -> Iterator[Any]:
    yield from (pytest.param(kind, values, id=kind) for kind, values in QUICK.items())
    for kind, values in SLOW.items():
        yield pytest.param(kind, values, id=kind, marks=pytest.mark.slow)


@pytest.mark.parametrize(("kind", "values"), list(cases()))
def test_tokens_and_logits_are_those_of_the_eager_pass(
    kind: str, values: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save(tmp_path, kind, values)
    caplog.set_level(logging.DEBUG, "tandem.engine.transformers_models")
    engine = make_engine(tmp_path, max_num_batched_tokens=24, prefill_chunk_tokens=5)
    assert ("called as modules" in caplog.text) == (kind in CALLED_AS_MODULES)
    assert ("stays as it is" not in caplog.text) == (kind in FUSED)
    check(model, generate(engine))
    check(model, generate(engine))  # the prompts' heads are in the prefix cache
    assert engine.block_pool.num_held == 0


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "_apply_gate")]


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_experts_that_kernels_compute_give_the_tokens_of_the_eager_pass(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU on which torch would look at the counts of their tokens."""
    model = save(tmp_path, kind, QUICK[kind])
    packed: list[bool] = []

    def pack_all(model: nn.Module, kernels: Kernels, *_: object) -> None:
        packed.extend(pack_experts(module, kernels) for module in experts_of(model))

    monkeypatch.setattr(generic_model, "swap_experts", pack_all)
    check(model, generate(make_engine(tmp_path, kernels="torch")))
    assert packed and all(packed)


@pytest.mark.parametrize("kind", ["gpt_oss", "nemotron_h"])
def test_experts_that_no_kernel_computes_stay(kind: str) -> None:
    """They are stored by input, or have no gates."""
    config = AutoConfig.for_model(kind, **(SIZES | EXPERTS))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = experts_of(model)
    assert found and not any(pack_experts(module, load_kernels("torch")) for module in found)


REFUSED = {
    "qwen3_next": r"layer 0 \(linear_attention\) has state outside of attention",
    "falcon_h1": r"layer 0 \(hybrid\) has state outside of attention",
    "bloom": r"layer 0 \(bloom\) does not compute attention through",
    "t5": "an encoder with a decoder",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_served_is_refused_before_weights_are_read(
    kind: str, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(kind, **SIZES)
    names = {
        "qwen3_next": "Qwen3NextForCausalLM",
        "falcon_h1": "FalconH1ForCausalLM",
        "bloom": "BloomForCausalLM",
        "t5": "T5ForConditionalGeneration",
    }
    config.architectures = [names[kind]]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=REFUSED[kind]):
        choose_model_config(tmp_path, "transformers")


def test_keys_and_values_of_other_versions_of_transformers_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "qwen3", {})
    native = choose_model_config(tmp_path, "auto")
    generic = choose_model_config(tmp_path, "transformers")
    assert native.architecture.code == ""
    assert generic.architecture.code.startswith("transformers 5.")
    monkeypatch.setattr(
        "tandem.engine.transformers_models.generic_build.transformers.__version__", "5.99.0"
    )
    other = choose_model_config(tmp_path, "transformers")
    assert len({native.kv_form, generic.kv_form, other.kv_form}) == 3


def test_auto_chooses_transformers_or_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "stablelm", {})
    assert choose_model_config(tmp_path, "auto").architecture.code
    monkeypatch.setattr("tandem.engine.execution.model_code.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'transformers"):
        choose_model_config(tmp_path, "auto")


@pytest.mark.parametrize("num_layers", [4, 10**6, 10**30])
def test_a_model_of_more_layers_than_its_files_have_is_refused_before_it_is_tried(
    num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "stablelm", {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": num_layers}))
    monkeypatch.setattr("tandem.engine.transformers_models.generic_build.probe", None)
    with pytest.raises(ModelError, match=r"num_hidden_layers|numbers of weights"):
        choose_model_config(tmp_path, "transformers")


@pytest.mark.parametrize("layer", [1, 2])
def test_a_model_that_fails_with_its_weights_is_refused_by_layer_before_it_is_served(
    layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On no device its code computes, so only a token through the whole model can tell."""
    save(tmp_path, "stablelm", {})
    forward = StableLmAttention.forward

    def fail(self: Any, hidden_states: torch.Tensor, **named: Any) -> Any:
        if self.layer_idx == layer and not hidden_states.is_meta:
            raise RuntimeError("it reads what is packed")
        return forward(self, hidden_states, **named)

    monkeypatch.setattr(StableLmAttention, "forward", fail)
    with pytest.raises(ModelError, match=f"a first token fails in layer {layer}: it reads"):
        make_engine(tmp_path)


@pytest.mark.parametrize("theta", [0, 1e-300])
def test_a_model_whose_first_token_has_no_numbers_is_refused_before_it_is_served(
    theta: float, tmp_path: Path
) -> None:
    save(tmp_path, "stablelm", {})
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_theta"] = theta
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="the logits of a first token are not finite"):
        make_engine(tmp_path)


WINDOWED = {
    "phimoe": EXPERTS,
    "mistral": {},
    "phi3": {},
    "starcoder2": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "gemma2": {"query_pre_attn_scalar": 16},
    "cohere2": {},
}


@pytest.mark.parametrize("kind", WINDOWED)
@pytest.mark.parametrize("window", [1, 8, 255, 256])
def test_a_window_is_kept_or_its_layer_is_refused(kind: str, window: int, tmp_path: Path) -> None:
    """Whatever a family's mask hides, its layers ask attention for, or the model is not served."""
    config = AutoConfig.for_model(kind, **(SIZES | WINDOWED[kind]), sliding_window=window)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    config.save_pretrained(tmp_path)
    if kind == "phimoe" and window < 256:  # its window reaches its mask alone
        with pytest.raises(ModelError, match="layer 0 asks attention for all positions before"):
            choose_model_config(tmp_path, "transformers")
        return
    sizes = choose_model_config(tmp_path, "transformers")
    windows = {sizes.layer_kind(layer).window for layer in range(sizes.num_layers)}
    assert windows <= {0, window} and (window in windows) == (window < 256)


def rules(longest: int) -> Iterator[tuple[int, Rule]]:
    """Yield windows, and rules that each differ from theirs in one place."""
    for window in (1, 2, 8, longest - 1):
        for shown, start in ((window + 1, 0), (window - 1, 0), (2 * window, longest // 2)):

            def rule(
                _: Any, head: Any, q: Any, key: Any, window: Any = window, it: Any = (shown, start)
            ) -> torch.Tensor:
                least = torch.where(q >= it[1], q - it[0], q - window)
                return (key <= q) & (key > least)

            yield window, rule
    yield 0, lambda _, head, q, key: key <= key
    yield 0, lambda _, head, q, key: (key <= q) & (key // 64 == q // 64)
    yield 0, lambda _, head, q, key: key < q


def test_a_rule_that_differs_from_a_window_in_one_place_is_none() -> None:
    for longest in (65, 256, 131_072):
        for window, rule in rules(longest):
            assert is_window(rule, window, longest) is False
        for window in (0, 1, 2, 8, longest - 1, longest, 2 * longest):
            kept = sliding_window_causal_mask_function(window or longest)
            assert is_window(kept, window, longest) is True
