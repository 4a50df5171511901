"""Prompts whose layers are announced while their last chunk is still computed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import LayerProgress, Sequence, layer_boundaries
from tandem.models.random_model import write_random_model
from tandem.runtime.wire.messages import SamplingParams, StopConditions

NUM_LAYERS = 5
BLOCK_SIZE = 4


def heard(progress: list[LayerProgress]) -> list[tuple[str, int, int]]:
    return [(each.request_id, each.num_computed_tokens, each.num_layers) for each in progress]


def test_groups_of_layers_are_even_and_cover_all_of_them() -> None:
    for num_layers in range(1, 81):
        for num_groups in range(1, 100):
            ends = layer_boundaries(num_layers, num_groups)
            sizes = [end - begin for begin, end in zip((0, *ends), ends, strict=False)]
            assert len(sizes) == min(num_groups, num_layers)
            assert ends[-1] == num_layers
            assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1
    assert layer_boundaries(6, 3) == (2, 4, 6)
    assert layer_boundaries(4, 0) == (4,)


@pytest.fixture
def news() -> list[list[LayerProgress]]:
    return []


def test_only_the_last_chunk_of_a_prompt_that_asks_is_announced_by_layers(
    fake: SimpleNamespace, news: list[list[LayerProgress]]
) -> None:
    harness = fake.make_harness(max_num_batched_tokens=8)
    harness.engine.on_layers = news.append
    seq = fake.make_seq("r", list(range(20)), 1, prefill_only=True, num_layer_groups=3)
    harness.engine.add(seq)
    harness.step()
    harness.step()
    assert news == []
    harness.step()
    assert [heard(each) for each in news] == [[("r", 20, 2)], [("r", 20, 4)]]
    assert all(each.event is None for progress in news for each in progress)
    assert harness.finished["r"].num_computed_tokens == 20


def test_each_prompt_of_a_step_hears_of_its_own_groups_only(
    fake: SimpleNamespace, news: list[list[LayerProgress]]
) -> None:
    harness = fake.make_harness()
    harness.engine.on_layers = news.append
    harness.engine.add(fake.make_seq("decoding", [1, 2, 3], 9))
    harness.step()
    for name, num_groups in (("two", 2), ("three", 3), ("six", 99), ("whole", 1)):
        prompt = list(range(100 * num_groups, 100 * num_groups + 9))
        seq = fake.make_seq(name, prompt, 1, prefill_only=True, num_layer_groups=num_groups)
        harness.engine.add(seq)
    harness.run()
    assert harness.runner.asked_for_layers == [(1, 2, 3, 4, 5)]
    assert [heard(each) for each in news] == [
        [("six", 9, 1)],
        [("three", 9, 2), ("six", 9, 2)],
        [("two", 9, 3), ("six", 9, 3)],
        [("three", 9, 4), ("six", 9, 4)],
        [("six", 9, 5)],
    ]


@pytest.mark.parametrize(
    ("listens", "prefill_only", "num_groups"),
    [(False, True, 3), (True, False, 3), (True, True, 1), (True, True, 0)],
)
def test_a_runner_is_asked_for_layers_only_when_somebody_wants_them(
    fake: SimpleNamespace,
    news: list[list[LayerProgress]],
    listens: bool,
    prefill_only: bool,
    num_groups: int,
) -> None:
    harness = fake.make_harness()
    if listens:
        harness.engine.on_layers = news.append
    harness.engine.add(
        fake.make_seq(
            "r", list(range(9)), 3, prefill_only=prefill_only, num_layer_groups=num_groups
        )
    )
    harness.run()
    assert harness.runner.asked_for_layers == [] and news == []


def test_news_of_a_step_waits_for_the_outputs_of_the_one_before(
    fake: SimpleNamespace, news: list[list[LayerProgress]]
) -> None:
    harness = fake.make_harness(max_num_batched_tokens=16)
    harness.engine.on_layers = news.append
    seq = fake.make_seq("r", list(range(20)), 1, prefill_only=True, num_layer_groups=2)
    harness.engine.add(seq)
    harness.engine.launch()
    assert len(harness.runner.asked_for_layers) == fake.overlap
    assert news == []
    (first,) = harness.engine.collect()
    assert first.num_computed_tokens == 16 and news == []
    harness.engine.launch()
    assert [heard(each) for each in news] == [[("r", 20, 3)]]
    harness.run()
    assert len(news) == 1


def test_nothing_is_announced_of_a_prompt_that_is_gone(
    fake: SimpleNamespace, news: list[list[LayerProgress]]
) -> None:
    harness = fake.make_harness(max_num_batched_tokens=16)
    harness.engine.on_layers = news.append
    harness.engine.add(
        fake.make_seq("r", list(range(20)), 1, prefill_only=True, num_layer_groups=2)
    )
    harness.step()
    harness.engine.abort("r")
    harness.run()
    assert news == []


# ---- with a model ---------------------------------------------------------------------------


@dataclass
class Snapshot:
    """What the pool held of one sequence when its layers were announced."""

    num_layers: int
    num_tokens: int
    kv: torch.Tensor  # [num_tokens, layers of the model, 2, num_kv_heads, head_dim]


@dataclass
class Watcher:
    """Copies what each piece of news is about, in the very moment of the news."""

    engine: Engine
    seqs: dict[str, Sequence]
    seen: dict[str, list[Snapshot]]

    def __call__(self, progress: list[LayerProgress]) -> None:
        for each in progress:
            kv = stored(self.engine, self.seqs[each.request_id], each.num_computed_tokens)
            self.seen[each.request_id].append(
                Snapshot(each.num_layers, each.num_computed_tokens, kv)
            )


def stored(engine: Engine, seq: Sequence, num_tokens: int) -> torch.Tensor:
    """A copy of the K/V of positions below `num_tokens`, token by token."""
    blocks = engine.runner.kv_cache.tensor[seq.block_table]
    return blocks.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[:num_tokens].clone()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), num_layers=NUM_LAYERS)


def watched(model: Path, prompts: dict[str, tuple[int, int]], **options: int) -> Watcher:
    """An engine over a poisoned pool; name |-> (tokens of its prompt, groups of layers)."""
    config = EngineConfig(
        model=str(model), device="cpu", num_blocks=200, block_size=BLOCK_SIZE, threads=1, **options
    )
    runner = ModelRunner(config)
    runner.kv_cache.tensor.fill_(float("nan"))
    engine = Engine(config, runner)
    seqs = {
        name: Sequence(
            name,
            [(7 * i + len(name) * length) % 250 for i in range(length)],
            length,
            SamplingParams(temperature=0),
            StopConditions(max_tokens=12, ignore_eos=True),
            prefill_only=num_groups > 0,
            num_layer_groups=num_groups,
        )
        for name, (length, num_groups) in prompts.items()
    }
    watcher = Watcher(engine, seqs, {name: [] for name in prompts})
    engine.on_layers = watcher
    return watcher


def run(watcher: Watcher) -> dict[str, list[int]]:
    texts: dict[str, list[int]] = {name: [] for name in watcher.seqs}
    for seq in watcher.seqs.values():
        watcher.engine.add(seq)
    while watcher.engine.has_work:
        for output in watcher.engine.step():
            assert output.error is None
            texts[output.request_id] += output.token_ids
    return texts


CASES: list[tuple[dict[str, tuple[int, int]], dict[str, int]]] = [
    ({"alone": (23, NUM_LAYERS)}, {}),
    ({"chunked": (50, 3)}, {"max_num_batched_tokens": 16}),
    ({"one left": (17, 2)}, {"max_num_batched_tokens": 16}),
    ({"a": (23, 5), "b": (9, 2), "c": (40, 3), "d": (12, 1)}, {}),
    (
        {"decoding": (6, 0), "a": (37, 5), "more": (11, 0), "b": (21, 2)},
        {"max_num_batched_tokens": 24, "prefill_chunk_tokens": 10},
    ),
]


@pytest.mark.parametrize(("prompts", "options"), CASES, ids=lambda value: ",".join(value))
def test_announced_layers_are_final_and_announced_before_the_next_is_there(
    model: Path, prompts: dict[str, tuple[int, int]], options: dict[str, int]
) -> None:
    watcher = watched(model, prompts, **options)
    texts = run(watcher)
    silent = watched(model, {name: (length, int(n > 0)) for name, (length, n) in prompts.items()})
    assert texts == run(silent)
    for name, (length, num_groups) in prompts.items():
        seen = watcher.seen[name]
        expected = layer_boundaries(NUM_LAYERS, num_groups)[:-1] if num_groups else ()
        assert [snapshot.num_layers for snapshot in seen] == list(expected)
        if not seen:
            continue
        final = stored(watcher.engine, watcher.seqs[name], length)
        assert not final.isnan().any()
        for snapshot in seen:
            n = snapshot.num_layers
            assert snapshot.num_tokens == length
            assert torch.equal(snapshot.kv[:, :n], final[:, :n])
            assert not torch.equal(snapshot.kv[:, n], final[:, n])


def test_layers_are_announced_before_their_attention_is_computed(model: Path) -> None:
    watcher = watched(model, {"r": (23, 2)})
    calls: list[str] = []

    def noted(name: str, kernel: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object, **options: object) -> None:
            calls.append(name)
            kernel(*args, **options)

        return call

    runner = watcher.engine.runner
    assert isinstance(runner, ModelRunner)
    kernels = runner._steps.model._kernels
    runner._steps.model._kernels = replace(
        kernels,
        store_qkv=noted("store", kernels.store_qkv),
        prefill_attention=noted("attend", kernels.prefill_attention),
        paged_decode_attention=noted("attend", kernels.paged_decode_attention),
    )
    watcher.engine.on_layers = lambda progress: calls.append(f"layers {progress[0].num_layers}")
    run(watcher)
    layer = ["store", "attend"]
    assert calls == [*layer, "store", "layers 2", "attend", *layer, *layer, *layer]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="an event needs a GPU")
def test_on_a_gpu_the_news_comes_with_the_event_that_makes_it_true(model: Path) -> None:
    config = EngineConfig(model=str(model), device="cuda:0", num_blocks=200, block_size=16)
    engine = Engine(config, ModelRunner(config))
    seq = Sequence(
        "r", list(range(200)), 200, SamplingParams(), StopConditions(), prefill_only=True
    )
    seq.num_layer_groups = NUM_LAYERS
    seen: list[tuple[int, torch.Tensor]] = []

    def hear(progress: list[LayerProgress]) -> None:
        (news,) = progress
        assert news.event is not None
        with torch.cuda.stream(torch.cuda.Stream()):
            news.event.synchronize()
            kv = engine.runner.kv_cache.tensor[seq.block_table, : news.num_layers].clone()
            torch.cuda.current_stream().synchronize()
        seen.append((news.num_layers, kv))

    engine.on_layers = hear
    engine.add(seq)
    while engine.has_work:
        engine.step()
    assert [n for n, _ in seen] == list(range(1, NUM_LAYERS))
    final = engine.runner.kv_cache.tensor[seq.block_table]
    filled = slice(0, 200 // 16)
    assert all(torch.equal(kv[filled], final[filled, :n]) for n, kv in seen)
