import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from tandem.bench.load.load import arrival_offsets_s
from tandem.bench.load.trace import TraceWorkload, read_trace
from tandem.bench.load.workload import (
    FileWorkload,
    PromptSpec,
    Seeds,
    SyntheticWorkload,
    Workload,
    read_prompt_file,
    token_ids,
)
from tandem.runtime.errors import ConfigError

SEEDS = Seeds(1, "run/a")

TRACE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]}
{"timestamp": 500, "input_length": 1536, "output_length": 3, "hash_ids": [0, 1, 3]}
{"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [0, 4]}
{"timestamp": 4000, "input_length": 40, "output_length": 1, "hash_ids": [5]}
{"timestamp": 9000, "input_length": 30000, "output_length": 2000, "hash_ids": [6]}
"""


def synthetic(**changes: Any) -> SyntheticWorkload:
    return SyntheticWorkload(
        **{"input_tokens": 32, "output_tokens": 8, "vocab_size": 100, **changes}
    )


def trace(tmp_path: Path, limit: int | None = None, **changes: Any) -> TraceWorkload:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    return TraceWorkload("trace.jsonl", read_trace(path, limit), vocab_size=100, **changes)


def test_a_trace_beyond_the_context_names_the_options_that_make_it_fit(tmp_path: Path) -> None:
    trace(tmp_path).require_fit(32_000, None)
    trace(tmp_path).require_fit(5000, 4)
    with pytest.raises(ConfigError, match=r"1 of 5 requests.* 5000 tokens.* 32000") as caught:
        trace(tmp_path).require_fit(5000, None)
    options = dict(re.findall(r"--([a-z-]+) (\d+)", caught.value.message))
    assert options.keys() == {"trace-block-tokens", "max-input-tokens"}
    trace(tmp_path, block_tokens=int(options["trace-block-tokens"])).require_fit(5000, None)
    trace(tmp_path, max_input_tokens=int(options["max-input-tokens"])).require_fit(5000, None)


def first(workload: Workload, count: int, seeds: Seeds = SEEDS) -> list[PromptSpec]:
    return list(itertools.islice(workload.prompts(seeds), count))


def ids(spec: PromptSpec) -> list[int]:
    assert isinstance(spec.prompt, list)
    return spec.prompt


def test_token_ids_depend_on_their_key_alone_and_stay_below_the_vocabulary() -> None:
    assert token_ids("a", 3, 1000) == token_ids("a", 5, 1000)[:3]
    assert token_ids("a", 8, 1000) != token_ids("b", 8, 1000)
    assert max(token_ids("a", 500, 7)) == 6
    assert token_ids("a", 0, 7) == []


def test_synthetic_prompts_have_the_asked_lengths_and_differ() -> None:
    specs = first(synthetic(), 3)
    assert [(len(ids(spec)), spec.num_output_tokens) for spec in specs] == [(32, 8)] * 3
    assert ids(specs[0]) != ids(specs[1])
    assert specs[0].offset_s is None


def test_the_same_seeds_give_the_same_prompts_and_other_content_the_same_lengths() -> None:
    workload = synthetic(input_stddev=10.0, output_stddev=3.0)
    again, other = first(workload, 20), first(workload, 20, Seeds(1, "run/b"))
    assert first(workload, 20) == again
    assert [len(ids(s)) for s in again] == [len(ids(s)) for s in other]
    assert ids(again[0]) != ids(other[0])
    assert len({len(ids(s)) for s in again}) > 5


def test_a_shared_prefix_opens_every_prompt_and_nothing_more_is_shared() -> None:
    one, two = first(synthetic(prefix_tokens=16), 2)
    assert ids(one)[:16] == ids(two)[:16]
    assert ids(one)[16:] != ids(two)[16:]
    assert len(ids(one)) == 32


def test_lengths_never_fall_below_the_prefix_and_one_token() -> None:
    specs = first(synthetic(input_tokens=20, input_stddev=50.0, prefix_tokens=16), 50)
    assert min(len(ids(spec)) for spec in specs) == 17


@pytest.mark.parametrize(
    "changes", [{"input_tokens": 0}, {"output_tokens": 0}, {"prefix_tokens": 32}, {"vocab_size": 0}]
)
def test_impossible_lengths_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        synthetic(**changes)


def test_a_prompt_file_mixes_text_prompts_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "plain text\n\n"
        '{"prompt": "from json", "output_tokens": 5}\n'
        '{"messages": [{"role": "user", "content": "hi"}]}\n'
    )
    specs = first(FileWorkload("f", read_prompt_file(path), 7, is_salted=True), 4)
    assert [spec.prompt for spec in specs] == [
        "plain text",
        "from json",
        [{"role": "user", "content": "hi"}],
        "plain text",  # and around again
    ]
    assert [spec.num_output_tokens for spec in specs] == [7, 5, 7, 7]
    assert specs[0].cache_salt == specs[1].cache_salt != ""


def test_the_salt_of_a_prompt_file_follows_the_run() -> None:
    workload = FileWorkload("f", ({"prompt": "x"},), None, is_salted=True)
    (one,), (two,) = first(workload, 1), first(workload, 1, Seeds(1, "run/b"))
    assert one.cache_salt != two.cache_salt
    (verbatim,) = first(FileWorkload("f", ({"prompt": "x"},), None, is_salted=False), 1)
    assert verbatim.cache_salt == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "no prompts"), ('{"prompt": ', "p.jsonl:1"), ('ok\n{"text": "x"}', "p.jsonl:2")],
)
def test_a_bad_prompt_file_is_refused_with_its_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_prompt_file(path)


def test_a_trace_shares_exactly_the_prefixes_that_its_hash_ids_share(tmp_path: Path) -> None:
    one, two, three, four, long = map(ids, first(trace(tmp_path), 5))
    assert [len(each) for each in (one, two, three, four)] == [1100, 1536, 700, 40]
    assert len(long) == 30_000  # of its own, beyond those of its hash ids
    assert long == ids(first(trace(tmp_path), 5)[4])
    assert one[:1024] == two[:1024]
    assert one[1024:] != two[1024:1100]
    assert three[:512] == one[:512]
    assert three[512:] != one[512:700]
    assert four != one[:40]


def test_a_trace_keeps_its_arrivals_scaled(tmp_path: Path) -> None:
    offsets = [spec.offset_s for spec in first(trace(tmp_path, time_scale=10.0), 9)]
    assert offsets == pytest.approx([0.0, 0.05, 0.3, 0.4, 0.9])


def test_caps_cut_prompts_and_answers(tmp_path: Path) -> None:
    workload = trace(tmp_path, max_input_tokens=600, max_output_tokens=10)
    specs = first(workload, 5)
    assert [len(ids(spec)) for spec in specs] == [600, 600, 600, 40, 600]
    assert [spec.num_output_tokens for spec in specs] == [10, 3, 9, 1, 10]
    assert workload.describe()["num_cut_prompts"] == 4


def test_fewer_tokens_per_hash_id_shrink_prompts_and_keep_the_sharing(tmp_path: Path) -> None:
    one, two, *_ = (ids(spec) for spec in first(trace(tmp_path, block_tokens=16), 5))
    assert (len(one), len(two)) == (34, 48)
    assert one[:32] == two[:32]
    assert one[32:] != two[32:34]


def test_a_trace_stops_at_its_limit_and_is_sorted_by_time(tmp_path: Path) -> None:
    assert len(trace(tmp_path, limit=2).entries) == 2
    path = tmp_path / "unsorted.jsonl"
    path.write_text("\n".join(reversed(TRACE.splitlines())))
    assert [entry.timestamp for entry in read_trace(path)] == [0, 500, 3000, 4000, 9000]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json", "t.jsonl:2"),
        ('{"timestamp": 1, "input_length": 5}', "t.jsonl:2.*output_length"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "at least 1 token"),
        ("not json", "Mooncake's.*Azure's.*BurstGPT's"),
    ],
)
def test_a_bad_trace_line_is_refused_with_its_number(
    tmp_path: Path, line: str, reason: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(TRACE.splitlines()[0] + "\n" + line)
    with pytest.raises(ConfigError, match=reason):
        read_trace(path)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2024-11-16 18:15:50.995169+00:00,879,0
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,230,1317,Conversation log
118,ChatGPT,417,0,417,Conversation log
"""


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AZURE, [(0, 374, 44), (4315, 396, 109)]),
        (BURSTGPT, [(0, 472, 18), (40_500, 1087, 230)]),
        ("\n".join(TRACE.splitlines()[:2]), [(0, 1100, 50), (500, 1536, 3)]),
        (f"[\n{','.join(TRACE.splitlines()[:2])}]", [(0, 1100, 50), (500, 1536, 3)]),
    ],
    ids=["azure", "burstgpt", "lines", "list"],
)
def test_a_trace_may_be_of_any_format(
    text: str, expected: list[tuple[float, int, int]], end: str, mark: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    path.write_bytes((mark + text.replace("\n", end)).encode())
    entries = read_trace(path)
    start = entries[0].timestamp
    found = [(round(e.timestamp - start), e.input_length, e.output_length) for e in entries]
    assert found == expected
    assert read_trace(path, limit=1) == entries[:1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("time,tokens\n1,2\n", r"t:1: not a header.*ContextTokens.*Request tokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", r"t:2: .*yesterday"),
        ("Timestamp,Request tokens,Response tokens\n1,5\n", r"t:2: .*index"),
        ("Timestamp,Request tokens,Response tokens\nnan,5,5\n", r"t:2: timestamp"),
        ("Timestamp,Request tokens,Response tokens\n1,-5,5\n", r"t:2: .*at least 1"),
        ("Timestamp,Request tokens,Response tokens\n1,0,5\n", r"no requests"),
        ('[{"timestamp": 1}]', r"t: not a trace entry.*input_length"),
        ('[{"timestamp": 1, "input_length": 1, "output_length": 0}]', r"t\[0\]: .*at least 1"),
        ("", "no requests"),
        (b"\xff\xfe", "not text in UTF-8; a trace is"),
    ],
)
def test_a_bad_trace_names_its_line_and_the_formats(
    text: str | bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "t"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=reason):
        read_trace(path)


def test_poisson_arrivals_have_the_rate_and_follow_the_seed() -> None:
    offsets = list(itertools.islice(arrival_offsets_s(50.0, "poisson", 3), 5000))
    assert offsets[0] == 0
    assert offsets[-1] / 4999 == pytest.approx(1 / 50, rel=0.05)
    assert offsets == list(itertools.islice(arrival_offsets_s(50.0, "poisson", 3), 5000))
    assert offsets != list(itertools.islice(arrival_offsets_s(50.0, "poisson", 4), 5000))
