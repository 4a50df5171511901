"""No step of an engine builds a kernel after the warm-up; nor does a table of another width.

Kernels are interpreted here. Their launches are given the keys by which Triton would look up their
builds for an H100.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.decoder.kernel_set import load_kernels
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.execution.prebuild import prebuild
from tandem.engine.execution.profile import StepProfile
from tandem.engine.schedule.sequence import Sequence
from tandem.engine.weights.weights import load_weights
from tandem.kernels import building
from tandem.models.random_model import write_random_model
from tandem.runtime.wire.messages import SamplingParams, StopConditions

BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    {"temperature": 0, "frequency_penalty": 1.5},
    {"temperature": 0.7, "repetition_penalty": 1.2, "logprobs": 3},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "presence_penalty": 0.5, "logit_bias": {7: 1.0}},
    {"temperature": 0, "logprobs": 1, "prompt_logprobs": True},
    {"temperature": 0, "logprobs": 0, "prompt_logprobs": True},
    {"temperature": 0.5},
]
UNDER_A_GRAMMAR = 8


@contextlib.contextmanager
def recording_keys(keys: set[str], *, launches: bool = True) -> Iterator[None]:
    """Add the kernel and the key of every launch of the body, which otherwise does nothing."""
    run, binders = InterpretedFunction.run, dict[Any, Any]()

    def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if self.fn not in binders:
            compiled = JITFunction(self.fn, **self.kwargs)
            signature, params = compiled.signature, compiled.params
            binders[self.fn] = create_function_from_signature(signature, params, BACKEND)
        _, key, options = binders[self.fn](*args, **kwargs)
        keys.add(f"{self.fn.__name__} {key} {options}")
        if not launches:
            return None
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = recorded
    try:
        yield
    finally:
        InterpretedFunction.run = run


@pytest.fixture(scope="module", params=["by_cublas", "deterministic", "cascade_attention"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_random_model(
        tmp_path_factory.mktemp("model"), num_layers=2, hidden_size=32, vocab_size=260
    )
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        kernels="triton",
        dtype="float32",
        block_size=2,
        num_blocks=64,
        max_model_len=40,
        max_num_seqs=3,
        max_num_batched_tokens=9,
        threads=1,
        deterministic=request.param == "deterministic",
        cascade_attention=request.param == "cascade_attention",
    )
    return Engine(config, ModelRunner(config))


def profile(runner: ModelRunner) -> StepProfile:
    """As a runner on a GPU makes it."""
    config, kernels = (
        runner.config,
        load_kernels("triton", deterministic=runner.config.deterministic),
    )
    assert config.max_model_len is not None
    cpu, model_config = torch.device("cpu"), runner.model_config
    return StepProfile(
        config, model_config, runner._steps.model, kernels, config.max_model_len, cpu
    )


class AnyToken:
    """A matcher that allows every token."""

    num_tokens = 0

    def __init__(self) -> None:
        self.forced: list[int] = []

    def begin(self, new_tokens: list[int]) -> None:
        self.num_tokens += len(new_tokens)

    def wait(self, timeout_s: float | None) -> bool:
        return True

    def mask(self) -> "npt.NDArray[np.int32]":
        return np.full(9, -1, np.int32)


def sequence(index: int, num_tokens: int, sampling: dict[str, Any]) -> Sequence:
    token_ids = [5 + (3 * index + position) % 90 for position in range(num_tokens)]
    params = SamplingParams(**sampling)
    stop = StopConditions(max_tokens=2, ignore_eos=True)
    return Sequence(f"r{index}", token_ids, num_tokens, params, stop)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted without a GPU only")
def test_serving_launches_no_build_that_the_warm_up_did_not(engine: Engine) -> None:
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    warm: set[str] = set()
    with recording_keys(warm):
        profile(runner).warm_up()
    assert len(warm) > 12
    served: set[str] = set()
    with recording_keys(served):
        # one alone, then several, with tables of 1 to 18 blocks
        for group in (
            [(0, 2)],
            [(1, 9), (3, 31)],
            [(2, 2), (3, 3)],
            [(4, 5), (5, 35)],
            [(6, 23), (7, 4)],
            [(8, 3), (0, 5)],
        ):
            for index, num_tokens in group:
                seq = sequence(index, num_tokens, REQUESTS[index])
                if index == UNDER_A_GRAMMAR:
                    seq.matcher = AnyToken()
                engine.add(seq)
            while engine.has_work:
                for output in engine.step():
                    assert output.error is None
    assert len(served) > 8
    assert not sorted(served - warm)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted without a GPU only")
def test_the_warm_up_launches_no_build_that_was_not_built_before_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    config, model_config = runner.config, runner.model_config
    assert config.max_model_len is not None
    options = {name: getattr(config, name) for name in ("deterministic", "cascade_attention")}
    kernels = load_kernels("triton", **options)
    weights = load_weights(config.model, model_config, torch.float32, torch.device("cpu"))
    early: set[str] = set()
    with monkeypatch.context() as patch, recording_keys(early, launches=False):
        patch.setattr(building, "building", contextlib.nullcontext)
        prebuild(config, model_config, weights, kernels, config.max_model_len)
    warm: set[str] = set()
    with recording_keys(warm):
        profile(runner).warm_up()
    assert not sorted(warm - early)


WIDTHS = """
import torch
from tandem.bench.kernels.compile import compiling, meta
from tandem.kernels.attention.prefill import prefill_attention
from tandem.kernels.attention.prefill_hopper import prefill_attention_hopper

for launch in (prefill_attention, prefill_attention_hopper):
    with compiling(90) as compiled:
        for width in (1, 3, 16):
            q, pool = (meta(*s, dtype=torch.bfloat16) for s in ((64, 8, 64), (99, 2, 2, 64, 64)))
            tables, starts, lens = (meta(*s, dtype=torch.int64) for s in ((2, width), (3,), (2,)))
            launch(q, pool, tables, starts, lens, 32, 0.125, torch.empty_like(q))
    assert len(compiled) == 3 and len({built.cubin for built in compiled}) == 1, launch
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_tables_of_every_width_share_a_build(compile_environment: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-c", WIDTHS], check=True, env=compile_environment, timeout=200)


COUNTED = """
import torch
from prometheus_client import REGISTRY
from tandem.bench.kernels.compile import compiling, meta
from tandem.kernels.layers.activation import silu_mul
from tandem.worker.kernel_builds import KernelBuilds

def launch(size):
    with compiling(90):
        gate_up, out = (meta(9, n * size, dtype=torch.bfloat16) for n in (2, 1))
        silu_mul(gate_up, out)

launch(64)
KernelBuilds().count()
launch(64)
for expected in (0, 1, 1):
    found = REGISTRY.get_sample_value("tandem_kernels_built_while_serving_total")
    assert found == expected, (found, expected)
    launch(128)
"""


def test_a_worker_counts_and_logs_the_kernels_built_while_it_serves(
    compile_environment: dict[str, str],
) -> None:
    command = [sys.executable, "-c", COUNTED]
    done = subprocess.run(
        command, check=True, env=compile_environment, timeout=100, capture_output=True, text=True
    )
    assert done.stderr.count("while serving, kernel _silu_mul_kernel was built in") == 1


WITHOUT_A_COMPILER = """
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from tandem.bench.kernels import compile
from tandem.worker.kernel_builds import listen_to_builds


class Module(str):
    def create_location_snapshot(self, path):
        pass


def no_code(module, metadata):
    metadata.update(name="", shared=0)
    return b""


def add_stages(self, stages, options, language, *_):
    stages["ttir"] = stages["ttgir"] = lambda module, metadata: module
    stages["cubin"] = no_code


# All of a launch but the compiler itself, which would take minutes.
ASTSource.make_ir = lambda *_, **__: Module()
CUDABackend.add_stages = add_stages
compile._read = lambda build, arch: build.hash
lines, builds = [], set()
listen_to_builds(lines.append)
"""
LISTENED = """
from tandem.bench.kernels.build_cases import build_cases

for case in build_cases(90):
    with compile.compiling(90) as compiled:
        case.launch()
    builds.update(compiled)
assert len(lines) >= len(builds) > 100, (len(lines), len(builds))
listen_to_builds(None)
"""


@pytest.mark.slow
def test_no_launch_of_serving_fails_because_its_build_is_listened_to(
    compile_environment: dict[str, str],
) -> None:
    run_without_a_compiler(LISTENED, compile_environment)


BY_A_HOOK = """
from tests.stream_order.mutants import BUILDS_BY_A_HOOK

with BUILDS_BY_A_HOOK.applied():
    listen_to_builds(lines.append)
"""


@pytest.mark.slow
def test_a_launch_of_serving_fails_where_its_build_is_told_to_a_hook(
    compile_environment: dict[str, str],
) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run_without_a_compiler(BY_A_HOOK + LISTENED, compile_environment)
    assert "is not JSON serializable" in failed.value.stderr


def run_without_a_compiler(script: str, environment: dict[str, str]) -> None:
    subprocess.run(
        [sys.executable, "-c", WITHOUT_A_COMPILER + script],
        check=True,
        cwd=Path(__file__).parents[2],
        env=environment,
        timeout=100,
        stderr=subprocess.PIPE,
        text=True,
    )


PREBUILT = """
from dataclasses import replace
from pathlib import Path

import torch
from triton.runtime import driver

from tandem.engine.config import EngineConfig
from tandem.engine.decoder.kernel_set import load_kernels
from tandem.engine.execution.prebuild import META, cache_folder, prebuild
from tandem.engine.architecture.config import load_model_config
from tandem.engine.weights.weights import empty_weights
from tandem.models.paths import BUNDLED_MODEL

driver.set_active(compile.AbsentChip(90))
config = EngineConfig(
    model=str(BUNDLED_MODEL), device="cuda:0", dtype="bfloat16", block_size=64, num_blocks=2048,
    max_num_batched_tokens=2048, kernels="triton",
)
model = replace(load_model_config(BUNDLED_MODEL), dtype="bfloat16")
for expected in (True, False):
    lines.clear()
    weights = empty_weights(model, torch.bfloat16, META)
    prebuild(config, model, weights, load_kernels("triton"), 2048)
    assert (len(lines) > 12) is expected, lines
assert any(cache_folder().iterdir())
"""


@pytest.mark.slow
def test_a_model_s_kernels_are_built_once_without_a_launch(
    compile_environment: dict[str, str],
) -> None:
    run_without_a_compiler(PREBUILT, compile_environment)
