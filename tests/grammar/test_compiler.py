"""Grammars of requests: those that compile, and those that must not cost a worker anything."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.grammar import compiler as compiler_module
from tandem.grammar.compiler import GrammarCompiler
from tandem.grammar.matcher import MAX_AHEAD, GrammarMatcher
from tandem.grammar.verdict import Order, Verdict, framed
from tandem.runtime.errors import InvalidRequestError, OverloadedError
from tandem.runtime.wire.messages import Grammar, GrammarKind
from tests.grammar.conftest import EOS, TOKENIZER, VOCAB_SIZE

pytestmark = pytest.mark.asyncio(loop_scope="module")


def allowed(matcher: GrammarMatcher) -> set[int]:
    """The tokens that may follow."""
    assert matcher.wait(60)
    words = [word & 0xFFFFFFFF for word in matcher.mask().tolist()]
    return {i for i in range(VOCAB_SIZE) if words[i // 32] >> i % 32 & 1}


def takes(matcher: GrammarMatcher, text: str, *, whole: bool = True) -> bool:
    """True when the text can be an answer, or the beginning of one."""
    for token_id in TOKENIZER.encode(text).ids:
        if token_id not in allowed(matcher):
            return False
        matcher.begin([token_id])
    return not whole or EOS in allowed(matcher)


TAGS = json.dumps(
    {
        "type": "structural_tag",
        "structures": [
            {"begin": "<tool>add", "schema": {"type": "integer"}, "end": "</tool>"},
            {"begin": "<|im_start|>{", "schema": {"enum": ["b"]}, "end": "}<|endoftext|>"},
        ],
        "triggers": ["<tool>", "<|im_start|>"],
    }
)


OVERLAPPING = json.dumps(
    {
        "structures": [
            {"begin": "<abx", "schema": {"type": "boolean"}, "end": ">"},
            {"begin": "<ay", "schema": {"type": "integer"}, "end": ">"},
        ],
        "triggers": ["<ab", "<a"],
    }
)
SPACED = json.dumps(
    {"structures": [{"begin": "<t>", "schema": True, "end": "<"}], "triggers": ["<t>"]}
)


@pytest.mark.parametrize(
    ("kind", "source", "answers", "others"),
    [
        ("regex", "[a-c]{2}|x", ["ab", "x"], ["abc", "d", "xx", ""]),
        ("lark", 'start: "(" start ")" | "a"', ["a", "((a))"], ["((a)", "()", "a)"]),
        ("gbnf", 'root ::= "yes" | "no" root', ["yes", "nonoyes"], ["no", "yess"]),
        ("json_schema", '{"type":"object"}', ["{}", '{ "a": [1, null] }'], ["[]", "{", "{}{"]),
        ("json_schema", "true", ["{}", "[1]", '"a"', "null"], ["nul", "{]"]),
        ("json_schema", '{"enum":["é\\n",3]}', ['"é\\n"', "3"], ['"e"', "4"]),
        (
            "json_schema",
            '{"type":"array","items":{"$ref":"#/$defs/a"},"$defs":{"a":{"const":1}}}',
            ["[]", "[1,1]"],
            ["[2]"],
        ),
        ("structural_tag", TAGS, ["free", "a <tool>add12</tool> b"], ["<tool>sub", "<tool>addx"]),
        ("structural_tag", OVERLAPPING, ["a<abxtrue>b", "<ay3><abxtrue>"], ["<ay true>", "<abz"]),
    ],
)
async def test_each_kind_allows_its_answers_and_no_other(
    compiler: GrammarCompiler, kind: GrammarKind, source: str, answers: list[str], others: list[str]
) -> None:
    for text in answers:
        assert takes(await compiler.compile(Grammar(kind, source), []), text), text
    for text in others:
        assert not takes(await compiler.compile(Grammar(kind, source), []), text), text


async def test_a_structural_tag_begins_and_ends_with_special_tokens(
    compiler: GrammarCompiler,
) -> None:
    matcher = await compiler.compile(Grammar("structural_tag", TAGS), [])
    assert takes(matcher, 'ok<|im_start|>{"b"}', whole=False)
    assert allowed(matcher) == {TOKENIZER.token_to_id("<|endoftext|>")}


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", '{"type":"object","properties":{"a":{}},"required":["a"]}'),
        ("lark", 'start: %json {"type":"object","properties":{"a":{}},"required":["a"]}'),
        ("json_schema", '{"type":"object","x-guidance":{"whitespace_pattern":"[ ]*"}}'),
        ("lark", "start: %json true"),
        ("structural_tag", SPACED),
    ],
)
async def test_white_space_between_the_parts_of_json_has_an_end(
    compiler: GrammarCompiler, kind: GrammarKind, source: str
) -> None:
    begin = "<t>{" if kind == "structural_tag" else "{"
    for space, is_allowed in (
        ("", True),
        (" ", True),
        ("\n", True),
        ("\r\n" + " " * 32, True),
        ("\n" + "\t" * 8, True),
        ("  ", False),
        ("\n\n", False),
        ("\n" + " " * 33, False),
        ("\t", False),
    ):
        matcher = await compiler.compile(Grammar(kind, source), [])
        assert takes(matcher, begin + space + '"a"', whole=False) == is_allowed, repr(space)


@pytest.mark.parametrize(
    ("kind", "source", "where"),
    [
        ("json_schema", "{", "column 2"),
        ("json_schema", '{"type":"strin"}', "strin"),
        ("json_schema", '{"not":{}}', "not"),
        ("json_schema", '{"$ref":"#/nowhere"}', "nowhere"),
        ("json_schema", "3", "object"),
        ("json_schema", "false", "false"),
        ("json_schema", '{"pattern":"(?=a)b","type":"string"}', "look-around"),
        ("regex", "(a", "unclosed group"),
        ("lark", 'start: foo\nbar: "a"', "foo"),
        ("lark", "start: %json {", "column"),
        ("gbnf", 'root ::= "a', "line 1"),
        ("gbnf", 'top ::= "a"', "root"),
        ("structural_tag", '{"structures":[],"triggers":["a"]}', "structures"),
        ("structural_tag", '{"structures":[{"begin":"a"}],"triggers":["a"]}', "end"),
        (
            "structural_tag",
            '{"structures":[{"begin":"b","end":""}],"triggers":["a"]}',
            "structures[0].begin",
        ),
    ],
)
async def test_a_fault_is_refused_with_its_place(
    compiler: GrammarCompiler, kind: GrammarKind, source: str, where: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await compiler.compile(Grammar(kind, source), [])
    field, message = caught.value.param or "", caught.value.message
    assert field.startswith("grammar") and where in f"{field} {message}"
    assert field != "grammar" or kind == "json_schema" or message.startswith(f"the {kind}: ")
    assert len(message) < 500 and "\n" not in message


def nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


def exploding() -> dict[str, Any]:
    """Every string of 300 patterns at once."""
    return {"type": "string", "allOf": [{"pattern": f"a.{{0,{i}}}b"} for i in range(300)]}


HOSTILE: dict[str, tuple[GrammarKind, str]] = {
    "nested": ("json_schema", nested(4000)),
    "patterns": ("json_schema", json.dumps(exploding())),
    "brackets": ("regex", "(" * 100_000 + ")" * 100_000),
    "rules": (
        "lark",
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(9000)) + '\nr9000: "x"',
    ),
    "gbnf": ("gbnf", "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
}


async def gaps(found: list[float]) -> None:
    """Measure how long the event loop takes from one turn to the next."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.002)
        found.append(time.perf_counter() - before)


@pytest.mark.parametrize("case", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_grammar_is_refused_in_time_and_alone(
    compiler: GrammarCompiler, case: tuple[GrammarKind, str]
) -> None:
    await compiler.compile(Grammar("regex", "warm"), [])
    found = [0.0]
    watching = asyncio.create_task(gaps(found))
    before = time.perf_counter()
    with pytest.raises(InvalidRequestError):
        await compiler.compile(Grammar(*case), [])
    took_s = time.perf_counter() - before
    watching.cancel()
    assert took_s < 60 and max(found) < 5  # 1 s and 50 ms, on a machine without other work
    assert takes(await compiler.compile(Grammar("regex", "after"), []), "after")


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "(a+)+b"),
        ("json_schema", '{"type":"string","maxLength":1000000000}'),
        ("json_schema", '{"type":"array","items":{"type":"string"},"minItems":1000000000}'),
        ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(10_000)]})),
    ],
)
async def test_a_large_number_or_many_choices_are_no_fault(
    compiler: GrammarCompiler, kind: GrammarKind, source: str
) -> None:
    assert allowed(await compiler.compile(Grammar(kind, source), []))


async def test_a_long_fixed_text_is_forced_part_by_part(compiler: GrammarCompiler) -> None:
    text = "".join(f"{i * i} " for i in range(90))
    matcher = await compiler.compile(Grammar("regex", f"[ab]{{4}}({text}|b{text})"), [])
    lengths, token_ids = set(), TOKENIZER.encode("abab" + text).ids
    for token_id in token_ids:
        assert token_id in allowed(matcher)
        lengths.add(len(matcher.forced))
        matcher.begin([token_id])
    assert allowed(matcher) == {EOS} and lengths == set(range(MAX_AHEAD + 1))
    assert len(token_ids) > 2 * MAX_AHEAD


async def test_an_answer_goes_on_after_the_tokens_that_it_has(compiler: GrammarCompiler) -> None:
    grammar = Grammar("regex", "abcdef")
    said = TOKENIZER.encode("abc").ids
    matcher = await compiler.compile(grammar, said)
    assert matcher.num_tokens == len(said) and takes(matcher, "def")
    with pytest.raises(InvalidRequestError, match="does not allow token 1 of the answer") as caught:
        await compiler.compile(grammar, [said[0], said[0]])
    assert caught.value.param == "grammar"


@pytest.fixture
def tried(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> list[Grammar]:
    """The grammars that were tried, in their order."""
    found: list[Grammar] = []
    trial = compiler._trial.verdict_on

    async def counting(grammar: Grammar, limit_s: float) -> Verdict | None:
        found.append(grammar)
        return await trial(grammar, limit_s)

    monkeypatch.setattr(compiler._trial, "verdict_on", counting)
    return found


async def test_one_compilation_serves_all_requests_of_a_grammar(
    compiler: GrammarCompiler, tried: list[Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "QUICK_TRIAL_S", 60.0)
    monkeypatch.setattr(compiler_module, "MAX_CACHED", 2)
    compiler._compiled.clear()
    one, two, three = (Grammar("regex", text) for text in ("one", "two", "three"))
    matchers = await asyncio.gather(*(compiler.compile(one, []) for _ in range(5)))
    assert tried == [one]
    assert takes(matchers[0], "one") and takes(matchers[1], "one")  # each its own
    for grammar in (two, one, three, one, two):
        await compiler.compile(grammar, [])
    assert tried == [one, two, three, two]


async def test_a_model_without_a_tokenizer_that_fits_has_no_compiler(tmp_path: Any) -> None:
    assert GrammarCompiler.of_model(tmp_path, VOCAB_SIZE, (EOS,)) is None
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.to_str())
    assert GrammarCompiler.of_model(tmp_path, VOCAB_SIZE - 100, (EOS,)) is None
    assert GrammarCompiler.of_model(tmp_path, VOCAB_SIZE, ()) is None


async def test_a_grammar_that_was_refused_is_not_tried_again(
    compiler: GrammarCompiler, tried: list[Grammar]
) -> None:
    faults = []
    deep = "(" * 100_001 + ")" * 100_001
    refused = [Grammar("regex", "(b"), Grammar("lark", "start: nothing"), Grammar("regex", deep)]
    for grammar in refused:
        for _ in range(3):
            with pytest.raises(InvalidRequestError) as caught:
                await compiler.compile(grammar, [])
            faults.append(caught.value.message)
    assert len({*faults}) == 3 and len({*tried}) == 3
    assert all(tried.count(grammar) <= 2 for grammar in tried)  # quickly, then at length
    assert not compiler._compiled.keys() & set(refused)


async def test_honest_grammars_pass_those_that_take_long_and_break(
    compiler: GrammarCompiler,
) -> None:
    """The long trials wait for one another; a grammar that compiles in milliseconds does not."""

    def long(i: int) -> Grammar:
        return Grammar("json_schema", json.dumps(exploding() | {"title": str(i)}))

    ended: list[str] = []

    async def note(grammar: Grammar, name: str, caller: str) -> None:
        try:
            await compiler.compile(grammar, [], caller)
        except InvalidRequestError:
            name += ", refused"
        except OverloadedError as error:
            assert error.retry_after_s > 0
            name += ", later"
        ended.append(name)

    hostile = [asyncio.create_task(note(long(i), "long", "eve")) for i in range(8)]
    await asyncio.sleep(0)
    await asyncio.gather(*(note(Grammar("regex", f"ok{i}"), "ok", "bob") for i in range(4)))
    assert ended.count("ok") == 4 and ended.count("long, refused") < len(hostile)
    await asyncio.gather(*hostile)
    assert "long" not in ended and "long, later" in ended


def _children(pid: int) -> list[Path]:
    """The processes that this one has forked."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path("/proc", each) for each in pids]


@pytest.mark.parametrize(
    "is_killed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["worker", "process"]
)
async def test_a_trial_ends_with_its_worker_and_without_its_process_of_trials(
    compiler: GrammarCompiler, is_killed: bool
) -> None:
    """The grammar would compute for a minute."""
    await compiler.compile(Grammar("regex", f"started {is_killed}"), [])
    process = compiler._trial._process
    assert process is not None and process.stdin is not None
    process.stdin.write(framed(Order(10**6, Grammar(*HOSTILE["patterns"]))))
    async with asyncio.timeout(60):
        while not (children := _children(process.pid)):
            await asyncio.sleep(0.01)
    if is_killed:
        process.kill()
    else:
        process.stdin.close()
    await process.wait()
    async with asyncio.timeout(60):
        while children[0].exists():
            await asyncio.sleep(0.01)
    assert takes(
        await compiler.compile(Grammar("regex", f"again {is_killed}"), []), f"again {is_killed}"
    )
