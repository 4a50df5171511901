"""Models that transformers' code computes: the tokens and logits of their own eager pass."""

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.kernel_set import Kernels, load_kernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models import generic_model
from tandem.engine.models.generic_attention import pack_experts
from tandem.engine.models.model_code import choose_model_config
from tandem.engine.schedule.sequence import Sequence
from tandem.runtime.errors import ModelError
from tandem.runtime.messages import SamplingParams, StopConditions
from tests.engine.models.generic_architectures import EXPERTS, FUSED, QUICK, SIZES, SLOW

NUM_TOKENS = 40
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


@torch.inference_mode()
def check(model: Any, results: list[tuple[list[int], list[float]]], bound: float) -> None:
    """Compare with one eager pass over each prompt and its answer."""
    for prompt, (tokens, logprobs) in zip(prompts(), results, strict=True):
        assert len(tokens) == len(logprobs) == NUM_TOKENS
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
        logits = logits[len(prompt) - 1 : -1].float()
        assert tokens == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).amax(-1)
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=bound, atol=bound)


def cases() -> Iterator[Any]:
    yield from (pytest.param(kind, values, id=kind) for kind, values in QUICK.items())
    for kind, values in SLOW.items():
        yield pytest.param(kind, values, id=kind, marks=pytest.mark.slow)


@pytest.mark.parametrize(("kind", "values"), list(cases()))
def test_tokens_and_logits_are_those_of_the_eager_pass(
    kind: str, values: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save(tmp_path, kind, values)
    caplog.set_level(logging.DEBUG, "tandem.engine.models")
    bound = 1e-4 if "num_experts" in values else 2e-5  # of logits and the sum of the softmax
    engine = make_engine(tmp_path, max_num_batched_tokens=24, prefill_chunk_tokens=5)
    assert "called as modules" not in caplog.text
    assert ("stays as it is" not in caplog.text) == (kind in FUSED)
    check(model, generate(engine), bound)
    check(model, generate(engine), bound)  # the prompts' heads are in the prefix cache
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
    check(model, generate(make_engine(tmp_path, kernels="torch")), 1e-4)
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
    monkeypatch.setattr("tandem.engine.models.generic_build.transformers.__version__", "5.99.0")
    other = choose_model_config(tmp_path, "transformers")
    assert len({native.kv_form, generic.kv_form, other.kv_form}) == 3


def test_auto_chooses_transformers_or_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "stablelm", {})
    assert choose_model_config(tmp_path, "auto").architecture.code
    monkeypatch.setattr("tandem.engine.models.model_code.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'transformers"):
        choose_model_config(tmp_path, "auto")
