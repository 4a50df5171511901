import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tandem.bench.engines.__main__ as tool
from tandem.bench.client.record import RequestRecord
from tandem.bench.engines.load import Load, Prompts, Turn, difference_of
from tandem.bench.engines.presets import Case, Engine, make_cases, make_engines
from tandem.bench.engines.report import KINDS, figures_of_case
from tandem.bench.load.metrics import summarize
from tandem.bench.load.workload import SyntheticWorkload
from tandem.bench.report.figures import Figure
from tandem.models.folder import byte_level_tokenizer
from tandem.runtime.errors import ConfigError

CASE = Case("float32", 1)
VALUES = {**CASE.values(), "model": "/m", "port": "80", "run_dir": "/r"}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level_tokenizer(512).save(str(folder / "tokenizer.json"))
    return Prompts(folder)


def test_an_engine_of_ones_own_is_a_command_with_placeholders() -> None:
    (engine,) = make_engines(["mine"], [], ["mine=/bin/serve '{model}' --at {port} -n {threads}"])
    assert engine.command_line(VALUES) == ["/bin/serve", "/m", "--at", "80", "-n", "1"]


@pytest.mark.parametrize(
    ("names", "pythons", "commands", "word"),
    [
        (["llama"], [], [], "'llama' is not one of tandem"),
        (["tandem", "tandem"], [], [], "named twice"),
        (["tandem"], ["vllm=/x"], [], "--python vllm=/x"),
        (["tandem"], ["tandem"], [], "--python tandem"),
        (["tandem"], [], ["tandem="], "--command tandem="),
    ],
)
def test_a_wrong_engine_option_is_named(
    names: list[str], pythons: list[str], commands: list[str], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        make_engines(names, pythons, commands)


def test_cases_are_every_dtype_with_every_number_of_threads() -> None:
    assert [case.label for case in make_cases(["bfloat16", "float32"], [1])] == [
        "float32, 1 thread",
        "bfloat16, 1 thread",
    ]
    with pytest.raises(ConfigError, match="4096 threads on"):
        make_cases(["float32"], [4096])


@settings(max_examples=50)
@given(key=st.text(max_size=8), num_tokens=st.integers(1, 300))
def test_a_prompt_is_exactly_as_long_as_asked_as_text_and_as_tokens(
    prompts: Prompts, key: str, num_tokens: int
) -> None:
    text, ids = prompts.make(key, num_tokens)
    encoded = byte_level_tokenizer(512).encode(text, add_special_tokens=False).ids
    assert encoded == ids
    assert len(ids) == num_tokens
    assert prompts.make(key, num_tokens) == (text, ids)


def test_different_keys_give_prompts_that_part_within_the_first_block(prompts: Prompts) -> None:
    heads = {prompts.make(f"0/{index}", 64)[0][:16] for index in range(300)}
    assert len(heads) == 300


def test_lengths_hang_on_the_seed_alone_and_vary_only_where_they_are_to() -> None:
    mixed = Load("mixed", 8, 50, SyntheticWorkload(512, 64, 128.0, 16.0))
    assert mixed.lengths(3) == mixed.lengths(3)
    assert mixed.lengths(3) != mixed.lengths(4)
    assert len(mixed.lengths(3)) == 50
    assert len({num_input for num_input, _ in mixed.lengths(3)}) > 20
    assert set(Load("alone", 1, 5, SyntheticWorkload(512, 64)).lengths(3)) == {(512, 64)}


def a_record(**changes: Any) -> RequestRecord:
    fields = {"num_input_tokens": 8, "num_output_tokens": 3, "has_usage": True, **changes}
    return RequestRecord(0, 0.0, 0.0, 0.4, [0.1, 0.2, 0.3], **fields)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"error": "http_500", "error_message": "boom"}, "http_500: boom"),
        ({"unfinished": True}, "failed a request"),
        ({"num_output_tokens": 2, "finish_reason": "stop"}, "2 tokens where 3 .*stop"),
        ({"num_output_tokens": 4}, "4 tokens where 3"),
        ({"num_input_tokens": 9}, "9 tokens in a prompt of 8"),
        ({"num_cached_tokens": 4}, "4 tokens of a new prompt"),
    ],
)
def test_unequal_work_is_told(changes: dict[str, Any], words: str) -> None:
    assert re.search(words, difference_of(a_record(**changes), 8, 3))


def test_equal_work_is_accepted_with_usage_and_without() -> None:
    assert difference_of(a_record(), 8, 3) == ""
    assert difference_of(a_record(has_usage=False, num_input_tokens=0), 8, 3) == ""


def a_turn(first_s: float, end_s: float, num_output: int = 5, cpu_s: float = 3.0) -> Turn:
    events_s = [first_s] if first_s == end_s else [first_s, end_s]
    record = RequestRecord(0, 0.0, 0.0, end_s, events_s, num_output_tokens=num_output)
    return Turn(summarize([record], {}), cpu_s)


def a_result(**turns: list[dict[str, Turn]]) -> dict[str, Figure]:
    """Return the figures of `engine=[its turns of each round]`."""
    ready_s = {engine: 10.0 + 40 * at for at, engine in enumerate(turns)}
    return {figure.name: figure for figure in figures_of_case("c", ready_s, turns)}


def test_figures_come_from_the_load_they_are_of() -> None:
    found = a_result(tandem=[{"alone": a_turn(0.5, 0.9), "mixed": a_turn(0.2, 2.0, 10, 1.0)}])
    values = {name: found[f"c_{name}_tandem"].value for name in KINDS}
    assert values == pytest.approx(
        {
            "ttft_ms": 500,
            "itl_alone_ms": 100,  # 0.4 s for four more tokens
            "itl_mixed_ms": 200,
            "tokens_per_s": 5,
            "gap_mixed_p99_ms": 1800,
            "ttft_mixed_ms": 200,
            "itl_mixed_mean_ms": 200,
            "request_mixed_mean_ms": 2000,
            "cpu_alone_s": 3,
            "cpu_mixed_s": 1,
        }
    )


def test_a_ratio_above_one_means_that_ours_is_better_whichever_way_a_figure_counts() -> None:
    ours, theirs, whole = a_turn(0.1, 0.5), a_turn(0.4, 1.0), a_turn(0.2, 0.2)
    found = a_result(
        tandem=[{"alone": ours, "mixed": ours}, {"alone": whole, "mixed": whole}],
        vllm=[{"alone": theirs, "mixed": theirs}, {"alone": whole, "mixed": theirs}],
    )
    assert found["c_ttft_ms_vllm"].samples == pytest.approx((400, 200))
    assert found["c_ttft_ms_vs_vllm"].samples == pytest.approx((4.0, 1.0))
    assert found["c_tokens_per_s_vs_vllm"].samples == pytest.approx((2.0, 5.0))
    assert found["c_gap_mixed_p99_ms_tandem"].samples[1] == 0.0, "answers of a single event"
    assert "c_gap_mixed_p99_ms_vs_vllm" not in found


def test_targets_are_of_the_engine_they_were_set_for() -> None:
    turns = {"tandem": a_turn(0.3, 0.8), "vllm": a_turn(0.2, 0.8), "transformers": a_turn(0.2, 1.5)}
    found = a_result(**{name: [{"alone": each, "mixed": each}] for name, each in turns.items()})
    verdicts = {name: found[f"c_{name}"].verdict for name in (
        "ready_s_tandem", "ready_s_vllm", "ttft_ms_vs_vllm", "ttft_ms_vs_transformers",
        "tokens_per_s_vs_vllm", "tokens_per_s_vs_transformers",
    )}  # fmt: skip
    assert list(verdicts.values()) == ["met", "", "missed", "", "met", "missed"]


class FakeProcess:
    """A process that notes when it may run."""

    def __init__(self, name: str, running: set[str]) -> None:
        self.engine = Engine(name, ())
        self._all = running

    @contextmanager
    def running(self) -> Iterator[None]:
        self._all.add(self.engine.name)
        yield
        self._all.remove(self.engine.name)


async def test_turns_are_load_by_load_one_at_a_time_and_turned_round_every_other_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running: set[str] = set()
    turns: list[tuple[str, str, str, int]] = []

    async def fake_turn(process: Any, load: Load, prompts: Any, content: str, seed: int) -> Turn:
        assert running == {process.engine.name}
        turns.append((load.name, process.engine.name, content, seed))
        return a_turn(0.1, 0.2, 2)

    monkeypatch.setattr(tool, "take_turn", fake_turn)
    options = tool.Options(requests=4, alone_requests=1, input_tokens=16, output_tokens=4, seed=7)
    processes: list[Any] = [FakeProcess(name, running) for name in "ab"]
    for index in range(2):
        taken = await tool.take_round(processes, options, index, Prompts.__new__(Prompts))
        assert {name: list(loads) for name, loads in taken.items()} == {
            "a": ["alone", "mixed"],
            "b": ["alone", "mixed"],
        }
    assert [(load, name) for load, name, *_ in turns] == [
        *(("alone", "a"), ("alone", "b"), ("mixed", "a"), ("mixed", "b")),
        *(("alone", "b"), ("alone", "a"), ("mixed", "b"), ("mixed", "a")),
    ]
    assert len({content for *_, content, _ in turns}) == 8  # no two turns share a prompt
    assert [seed for *_, seed in turns] == [7] * 4 + [8] * 4  # but engines share lengths
