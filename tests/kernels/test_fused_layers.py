"""Layers of five kernels: as many are launched, and they answer as layers of nine do."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from tandem.engine.decoder.decoder import Model
from tandem.engine.decoder.kernel_set import load_kernels
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Chunk
from tests.engine.tiny_models import make_model
from tests.kernels.test_runner_with_kernels import answer, make_runner, sequence

ALLOCATIONS = ("aten.empty", "aten.new_empty", "aten.empty_like")
KERNELS = Counter(qkv_kernel=1, paged_decode_kernel=1, linear_kernel=3)


class CountedWork(TorchDispatchMode):
    """Counts launches of kernels, and calls of torch that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view and not str(func).startswith(ALLOCATIONS):
            self.work[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Yield a count of the body's work; what the interpreter does with tensors is none."""
    run, mode = InterpretedFunction.run, CountedWork()

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode.work[self.fn.__name__] += 1
        with _disable_current_modes():
            return run(self, *args, **kwargs)

    InterpretedFunction.run = recorded
    try:
        with mode:
            yield mode.work
    finally:
        InterpretedFunction.run = run


def make(folder: Path, model_type: str, **changes: Any) -> Path:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
    make_model(folder, model_type, **(sizes | changes))
    return folder


def is_fused(runner: ModelRunner) -> bool:
    assert isinstance(runner._steps.model, Model)
    return runner._steps.model._max_fused_tokens > 0


def work_of_a_decode_step(folder: Path, **options: Any) -> Counter[str]:
    runner = make_runner(folder, "triton", **options)
    seqs = sequence(6, [3, 4], 0), sequence(5, [7, 9], 1)
    for seq in seqs:
        runner.launch([Chunk(seq, 0, seq.num_tokens - 1, False)]).tokens()
    with counted() as work:
        steps = runner.launch([Chunk(s, s.num_tokens - 1, s.num_tokens, True) for s in seqs])
    steps.tokens()
    return work


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are counted where interpreted")
@pytest.mark.parametrize(
    "option", ["fused_products", pytest.param("deterministic", marks=pytest.mark.slow)]
)
def test_a_layer_of_a_decode_step_is_five_kernels(option: str, tmp_path: Path) -> None:
    folders = [make(tmp_path / f"{n}", "qwen3", num_hidden_layers=n) for n in (1, 2)]
    one, two = (work_of_a_decode_step(folder, **{option: True}) for folder in folders)
    assert two - one == KERNELS


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3", {}),
        pytest.param("qwen2", {}, marks=pytest.mark.slow),
        pytest.param("llama", {"attention_bias": True, "mlp_bias": True}, marks=pytest.mark.slow),
    ],
)
def test_fused_layers_answer_as_others(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = make(tmp_path, model_type, **changes)
    runner = make_runner(folder, "triton", deterministic=True)
    assert is_fused(runner)
    assert answer(runner) == answer(make_runner(folder, "torch"))


@pytest.mark.parametrize("model_type", ["gemma2", pytest.param("olmo2", marks=pytest.mark.slow)])
def test_layers_with_other_parts_are_not_fused(model_type: str, tmp_path: Path) -> None:
    runner = make_runner(make(tmp_path, model_type), "triton", fused_products=True)
    assert not is_fused(runner)


def test_only_few_tokens_are_multiplied_by_fused_products_unless_all_are() -> None:
    few = load_kernels("triton", fused_products=True).fused
    every = load_kernels("triton", fused_products=True, deterministic=True).fused
    assert few is not None and few.max_tokens == 64
    assert every is not None and every.max_tokens > 1 << 20
    assert load_kernels("triton").fused is None
    assert load_kernels("torch", fused_products=True).fused is None
