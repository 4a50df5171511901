"""The runner against transformers, and against itself under every way of cutting the work."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.memory.kv_blocks import Memory, num_spare_blocks
from tandem.engine.schedule.sequence import Chunk, Sequence
from tandem.engine.step.sampler import SamplingPlan
from tandem.kernels.cpu.linear import is_for_c
from tandem.kernels.linear import launch as linear_in_triton
from tandem.kernels.sampling.rows import SampledRows
from tandem.runtime.errors import CapacityError, ConfigError
from tandem.runtime.wire.messages import SamplingParams, StopConditions
from tests.accuracy import judged_logits
from tests.engine.tiny_models import LLAMA3_ROPE

transformers_logging.disable_progress_bar()

VOCAB_SIZE = 211  # odd, and no multiple of any vector width
GREEDY = SamplingParams(temperature=0)


def save_model(folder: Path, kind: str, **changes: Any) -> Any:
    """A random transformers model, saved into `folder` and returned.

    Weights are large, so that the best two logits are far apart.
    """
    config_type, model_type = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[kind]
    shape: dict[str, Any] = {
        "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 80, "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512, "initializer_range": 0.3, "attn_implementation": "eager",
        "bos_token_id": None, "eos_token_id": 7,
    }  # fmt: skip
    torch.manual_seed(1)
    model = model_type(config_type(**(shape | changes))).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        elif name.endswith(".bias"):  # which transformers makes zero
            torch.nn.init.uniform_(weight, -1.0, 1.0)
    model.save_pretrained(folder)
    return model


def make_runner(folder: Path, **changes: Any) -> ModelRunner:
    runner = ModelRunner(
        EngineConfig(**({"model": str(folder), "num_blocks": 400, "threads": 1} | changes))
    )
    # What no sequence has written is poison.
    runner.kv_cache.tensor.fill_(float("nan"))
    return runner


class Driver:
    """Computes sequences in random chunks and mixtures, over scattered blocks."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.random = random.Random(seed)
        self.free = list(range(runner.kv_cache.num_blocks))
        self.random.shuffle(self.free)
        self.batch_rows = list(range(runner.config.max_num_seqs))
        self.random.shuffle(self.batch_rows)

    def sequence(self, prompt: list[int], sampling: SamplingParams = GREEDY) -> Sequence:
        stop = StopConditions(max_tokens=99)
        return Sequence(
            "s", list(prompt), len(prompt), sampling, stop, batch_row=self.batch_rows.pop()
        )

    def chunk(self, seq: Sequence, most: int) -> Chunk:
        start = seq.num_computed_tokens
        end = min(len(seq.token_ids), start + self.random.randint(1, most))
        while len(seq.block_table) * self.runner.kv_cache.block_size < end:
            seq.block_table.append(self.free.pop())
        return Chunk(seq, start, end, end == len(seq.token_ids))

    def generate(
        self, seqs: list[Sequence], num_tokens: int, most: int = 40
    ) -> dict[int, list[dict[int, float]]]:
        """Until each has `num_tokens` new tokens; index |-> its rows of log-probabilities."""
        rows: dict[int, list[dict[int, float]]] = {index: [] for index in range(len(seqs))}
        while todo := [i for i, seq in enumerate(seqs) if seq.num_generated_tokens < num_tokens]:
            todo = self.random.sample(todo, self.random.randint((len(todo) + 1) // 2, len(todo)))
            chunks = [self.chunk(seqs[index], most) for index in todo]
            tokens = iter(self.runner.launch(chunks).tokens())
            for index, chunk in zip(todo, chunks, strict=True):
                chunk.seq.num_computed_tokens = chunk.end
                if chunk.samples:
                    token = next(tokens)
                    chunk.seq.token_ids.append(token.token_id)
                    if token.logprobs is not None:
                        rows[index].append(dict(token.logprobs.top))
            assert next(tokens, None) is None
        return rows


def prompts(count: int = 20) -> list[list[int]]:
    generator = random.Random(3)
    lengths = [1, 2, 15, 16, 17, 33, 90] + [generator.randint(1, 60) for _ in range(count - 7)]
    return [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def assert_same_as_transformers(
    model: Any, runner: ModelRunner, num_tokens: int = 24, num_prompts: int = 12
) -> None:
    """Greedy continuations are what `model` would choose; logits and logprobs are as near."""
    sampling = SamplingParams(temperature=0, logprobs=VOCAB_SIZE)
    driver = Driver(runner)
    seen = logits_of(runner)
    seqs = [driver.sequence(prompt, sampling) for prompt in prompts()[:num_prompts]]
    rows = driver.generate(seqs, num_tokens)
    for index, seq in enumerate(seqs):
        judged = judged_logits(model, seq.token_ids[:-1])
        answer = slice(seq.num_prompt_tokens - 1, None)
        judged.assert_likeliest(seq.token_ids[seq.num_prompt_tokens :], answer)
        ours = torch.tensor([[row[token] for token in range(VOCAB_SIZE)] for row in rows[index]])
        judged.each(lambda logits: logits.log_softmax(-1)).assert_near(ours, answer)
        positions = range(seq.num_prompt_tokens, len(seq.token_ids))
        raw = torch.stack([seen[id(seq), position] for position in positions])
        judged.assert_near(raw, answer)


def logits_of(runner: ModelRunner) -> dict[tuple[int, int], torch.Tensor]:
    """(id of a sequence, position to be drawn) |-> logits [vocab_size], filled as `runner` runs."""
    seen: dict[tuple[int, int], torch.Tensor] = {}
    sample = runner._steps.sampler.sample

    def sample_and_tell(
        logits: torch.Tensor, batch_rows: torch.Tensor, positions: torch.Tensor, plan: SamplingPlan
    ) -> SampledRows:
        rows = zip(batch_rows.tolist(), positions.tolist(), logits.clone(), strict=True)
        for batch_row, position, its_logits in rows:
            seen[id(runner._steps.batch_rows._owners[batch_row]), position] = its_logits
        return sample(logits, batch_rows, positions, plan)

    runner._steps.sampler.sample = sample_and_tell
    return seen


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 24, "rope_theta": 1e6}),
        ("qwen3", {"num_attention_heads": 8, "rope_scaling": {"type": "linear", "factor": 4.0}}),
        (
            "qwen3",
            {"num_attention_heads": 8, "num_key_value_heads": 1, "rope_scaling": LLAMA3_ROPE},
        ),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"tie_word_embeddings": True, "rope_scaling": LLAMA3_ROPE}),
        ("llama", {"num_attention_heads": 8, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 6}),
        ("qwen2", {"tie_word_embeddings": True, "sliding_window": 32}),
        ("qwen2", {"num_attention_heads": 8, "num_key_value_heads": 1, "rope_theta": 1e6}),
    ],
)
def test_greedy_answers_are_those_of_transformers(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    model = save_model(tmp_path, kind, **changes)
    assert_same_as_transformers(model, make_runner(tmp_path))
    assert_same_as_transformers(model, make_runner(tmp_path, kernels="torch"), num_tokens=4)


@pytest.mark.parametrize("kernels", ["c", "torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_every_kind_of_kernels_adds_biases(tmp_path: Path, kernels: str) -> None:
    model = save_model(tmp_path, "qwen2", num_hidden_layers=1)
    runner = make_runner(tmp_path, kernels=kernels, max_model_len=64, max_num_seqs=4)
    assert_same_as_transformers(model, runner, num_tokens=2, num_prompts=4)


@pytest.mark.slow
def test_a_deterministic_runner_multiplies_without_cublas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path, "qwen2", num_hidden_layers=1)
    options = {"kernels": "triton", "max_model_len": 64, "max_num_seqs": 4}
    monkeypatch.setattr(
        linear_in_triton, "F", None
    )  # torch.nn.functional, whose products those are
    with pytest.raises(AttributeError):
        make_runner(tmp_path, **options)
    runner = make_runner(tmp_path, deterministic=True, **options)
    assert_same_as_transformers(model, runner, num_tokens=2, num_prompts=4)


@pytest.mark.parametrize(
    ("block_size", "kernels"), [(1, "c"), (5, "c"), (64, "c"), (1, "torch"), (5, "torch")]
)
def test_any_block_size_gives_the_same_answers(
    tmp_path: Path, block_size: int, kernels: str
) -> None:
    model = save_model(tmp_path, "qwen3")
    runner = make_runner(tmp_path, block_size=block_size, num_blocks=2000, kernels=kernels)
    assert_same_as_transformers(model, runner, num_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path, "qwen3")
    return path


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.9, top_p=0.9, seed=5)])
def test_answers_depend_on_no_chunking_and_no_company(
    folder: Path, sampling: SamplingParams
) -> None:
    runner = make_runner(folder)
    answers = []
    for seed, most in [(0, 1), (1, 7), (2, 100)]:
        runner.kv_cache.tensor.fill_(float("nan"))
        driver = Driver(runner, seed)
        seqs = [driver.sequence(prompt, sampling) for prompt in prompts(8)]
        driver.generate(seqs, 24, most)
        answers.append([seq.token_ids for seq in seqs])
    alone = Driver(runner, 3)
    seq = alone.sequence(prompts(8)[4], sampling)
    alone.generate([seq], 24, most=100)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][4] == seq.token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_logits_in_c_are_the_same_to_the_last_bit_in_any_chunks_and_company(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    if not is_for_c(torch.ones(2, 2, dtype=getattr(torch, dtype))):
        pytest.skip("this processor does not multiply bfloat16 in C")
    save_model(tmp_path, kind)
    runs = []
    for threads, seed, most in [(1, 0, 1), (1, 1, 7), (2, 2, 100)]:
        runner = make_runner(tmp_path, kernels="c", dtype=dtype, threads=threads)
        seen, driver = logits_of(runner), Driver(runner, seed)
        seqs = [driver.sequence(prompt) for prompt in prompts(8)]
        driver.generate(seqs, 24, most)
        positions = [(seq, seq.num_prompt_tokens + i) for seq in seqs for i in range(24)]
        runs.append(torch.stack([seen[id(seq), position] for seq, position in positions]))
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def test_triton_on_a_cpu_is_refused_without_its_interpreter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET"):
        make_runner(folder, kernels="triton", device="cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_close_to_full(folder: Path, dtype: str) -> None:
    sampling = SamplingParams(temperature=0, logprobs=VOCAB_SIZE)
    tables = []
    for name in ("float32", dtype):
        driver = Driver(make_runner(folder, dtype=name))
        assert driver.runner.kv_cache.tensor.dtype == getattr(torch, name)
        rows = driver.generate([driver.sequence(prompts()[6], sampling)], 1)[0]
        tables.append(torch.tensor([rows[0][token] for token in range(VOCAB_SIZE)]).exp())
    assert (tables[0] - tables[1]).abs().max() < 0.1


def test_the_last_layer_is_computed_for_tokens_alone_that_sample(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(folder)
    driver, num_rows = Driver(runner), []
    kernels = runner._steps.model._kernels

    def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
        num_rows.append(len(gate_up))
        kernels.silu_mul(gate_up, out)

    monkeypatch.setattr(runner._steps.model, "_activate", silu_mul)
    long, short = driver.sequence(list(range(40))), driver.sequence([5])
    long.block_table, short.block_table = [4, 9, 2], [7]
    runner.launch([Chunk(long, 0, 30, False)])
    assert len(runner.launch([Chunk(long, 30, 40, True), Chunk(short, 0, 1, True)]).tokens()) == 2
    assert num_rows == [30, 0, 11, 2]


def test_a_step_without_chunks_gives_no_tokens(folder: Path) -> None:
    step = make_runner(folder).launch([])
    assert step.tokens() == [] and step.seconds >= 0


def test_the_kv_pool_is_aligned_zeroed_and_one_record_per_block(folder: Path) -> None:
    cache = ModelRunner(EngineConfig(model=str(folder), kv_memory_bytes=10**6, threads=1)).kv_cache
    assert cache.block_bytes == 2 * 2 * 2 * 16 * 16 * 4
    num_all = cache.num_blocks + cache.num_spare_blocks
    assert cache.num_blocks < num_all <= 10**6 // cache.block_bytes
    assert cache.tensor.shape == (num_all, 2, 2, 2, 16, 16)
    assert cache.tensor.stride(0) * 4 == cache.block_bytes and cache.tensor.is_contiguous()
    assert cache.base_address % 4096 == 0 and cache.base_address == cache.tensor.data_ptr()
    assert (cache.memory, cache.device_id) == ("DRAM", 0)
    assert not cache.tensor.any()


def test_a_configured_number_of_blocks_is_for_sequences_alone(folder: Path) -> None:
    cache = make_runner(folder).kv_cache
    assert cache.num_blocks == 400 and cache.num_spare_blocks == 100
    assert cache.tensor.shape[0] == 500


@pytest.mark.parametrize(
    ("block_bytes", "memory", "num_blocks", "num_spare"),
    [
        (32 * 2**10, "DRAM", 8192, 128),  # 4 MiB
        (3 * 2**20, "DRAM", 8192, 2),
        (2**20, "VRAM", 8192, 256),  # 256 MiB
        (2**10, "VRAM", 8192, 256),
        (2**10, "DRAM", 100, 25),
        (2**10, "DRAM", 1, 2),
    ],
)
def test_spare_blocks_are_a_few_megabytes_and_little_of_a_small_pool(
    block_bytes: int, memory: Memory, num_blocks: int, num_spare: int
) -> None:
    assert num_spare_blocks(block_bytes, memory, num_blocks) == num_spare


def test_spare_blocks_are_never_given_to_a_sequence(folder: Path) -> None:
    runner = make_runner(folder, num_blocks=24)
    runner.kv_cache.tensor[24:].fill_(-42.0)
    engine = Engine(runner.config, runner)
    for index, prompt in enumerate(prompts(16)):
        stop = StopConditions(max_tokens=30, ignore_eos=True)
        engine.add(Sequence(f"r{index}", list(prompt), len(prompt), GREEDY, stop))
    while engine.has_work:
        assert all(output.error is None for output in engine.step())
    assert engine.load().num_preemptions > 0
    assert runner.kv_cache.tensor.shape[0] == 24 + runner.kv_cache.num_spare_blocks == 30
    assert bool((runner.kv_cache.tensor[24:] == -42.0).all())
    table = engine.block_pool.allocate(24)
    assert table is not None and sorted(table) == list(range(24))


def test_a_pool_too_small_for_one_sequence_is_refused_with_the_numbers(folder: Path) -> None:
    with pytest.raises(CapacityError, match=r"holds 3 blocks of 16 .* 100 tokens needs 7 blocks"):
        make_runner(folder, num_blocks=3, max_model_len=100)
    with pytest.raises(CapacityError, match="holds 0 blocks"):
        make_runner(folder, num_blocks=None, kv_memory_bytes=10)


def test_a_length_beyond_the_models_positions_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"513 .* 512"):
        make_runner(folder, max_model_len=513)


def test_an_unset_length_is_what_model_and_pool_hold(folder: Path) -> None:
    assert make_runner(folder).config.max_model_len == 512
    assert make_runner(folder, num_blocks=5).config.max_model_len == 80


def test_auto_resolves_to_what_runs(folder: Path) -> None:
    config = make_runner(folder, device="cpu").config
    assert (config.device, config.dtype, config.kernels) == ("cpu", "float32", "c")
