"""The bundled model's answers, which must not depend on graphs, overlap or a prompt's company."""

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.bench.report.figures import Figure, counted
from tandem.bench.report.setting import Setting
from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Sequence as EngineSequence
from tandem.models.paths import BUNDLED_MODEL
from tandem.runtime.wire.messages import SamplingParams, StopConditions
from tandem.worker.kernel_builds import listen_to_builds

Answers = list[list[int]]


Variants = Mapping[str, Mapping[str, bool]]
EAGER = {"cuda_graphs": False, "overlap": False}
VARIANTS: Variants = {
    "graphs_and_overlap": {},
    "fused_products_and_dependent_launches": {"deterministic": True, "dependent_launch": True},
}
ALL_VARIANTS: Variants = {
    "graphs": {"overlap": False},
    "dependent_launches": {"dependent_launch": True},
    "cascade_attention": {"cascade_attention": True},  # no blocks are shared here
    "fused_products": {"deterministic": True},
}


def graphs(setting: Setting) -> Iterator[Figure]:
    """Compare eager steps with graphs, overlap, fused products and kernels that begin early."""
    yield from _compare(setting, VARIANTS)


def all_graphs(setting: Setting) -> Iterator[Figure]:
    """Compare eager steps with those of each option alone."""
    yield from _compare(setting, ALL_VARIANTS)


def _compare(setting: Setting, variants: Variants) -> Iterator[Figure]:
    prompts = _prompts(setting.size(32, 3), setting.size(300, 20))
    num_tokens = setting.size(200, 5)
    eager: dict[bool, Answers] = {}
    for name, options in variants.items():
        is_fused = "deterministic" in options
        if is_fused not in eager:
            engine = _engine(setting, **EAGER, deterministic=is_fused)
            eager[is_fused] = _generate(engine, prompts, num_tokens)
            del engine
        engine = _engine(setting, **options)
        with _counting_builds(setting) as built:
            answers = _generate(engine, prompts, num_tokens)
        label = f"answers by {name.replace('_', ' ')}"
        yield _different(name, label, answers, eager[is_fused], is_judged=is_fused)
        label = "kernels built while serving"
        yield counted(f"{name}_builds", label, len(built), notes=tuple(built))
        del engine


def parity(setting: Setting) -> Iterator[Figure]:
    """Compare prompts that are computed alone, in company, and in chunks."""
    prompts = _prompts(setting.size(64, 3), setting.size(600, 40))
    num_tokens = setting.size(256, 4)
    engine = _engine(setting)
    alone = [_generate(engine, [prompt], num_tokens)[0] for prompt in prompts]
    together = _generate(engine, prompts, num_tokens)
    # no target: the rate is what is asked
    yield _different("parity_together", "answers in company", together, alone, is_judged=False)
    del engine
    chunked = _generate(_engine(setting, max_num_batched_tokens=64), prompts, num_tokens)
    yield _different("parity_chunked", "answers in chunks of 64", chunked, alone, is_judged=False)
    engine = _engine(setting, deterministic=True)
    alone = [_generate(engine, [prompt], num_tokens)[0] for prompt in prompts]
    together = _generate(engine, prompts, num_tokens)
    yield _different("parity_deterministic", "deterministic answers in company", together, alone)


def _engine(setting: Setting, **options: Any) -> Engine:
    config = EngineConfig(
        model=str(BUNDLED_MODEL),
        device=str(setting.device),
        num_blocks=setting.size(2048, 256),
        enable_prefix_cache=False,
        **options,
    )
    return Engine(config, ModelRunner(config))


@contextlib.contextmanager
def _counting_builds(setting: Setting) -> Iterator[list[str]]:
    """Yield a list to which the body's builds of kernels are added."""
    built: list[str] = []
    if setting.is_dry:  # there may be no Triton, and kernels in C
        yield built
        return
    listen_to_builds(built.append)
    try:
        yield built
    finally:
        listen_to_builds(None)


def _prompts(count: int, longest: int) -> Answers:
    draw = random.Random(0)
    return [
        [draw.randrange(3, 1000) for _ in range(draw.randint(1, longest))] for _ in range(count)
    ]


def _generate(engine: Engine, prompts: Sequence[list[int]], num_tokens: int) -> Answers:
    """Return the greedy answers; raise the error of a sequence that failed."""
    answers: Answers = [[] for _ in prompts]
    stop = StopConditions(max_tokens=num_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0)
        engine.add(EngineSequence(str(index), list(prompt), len(prompt), params, stop))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            answers[int(output.request_id)] += output.token_ids
    return answers


def _different(
    name: str, label: str, answers: Answers, expected: Answers, *, is_judged: bool = True
) -> Figure:
    num_different = sum(one != other for one, other in zip(answers, expected, strict=True))
    label = f"{label} that differ, of {len(expected)}"
    if is_judged:
        return counted(name, label, num_different)
    return Figure(name, label, "", (float(num_different),))
