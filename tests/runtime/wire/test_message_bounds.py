"""Every field of every message that crosses processes has a bound where it is declared.

The messages are found, not listed: all that `decoding` takes, in all modules of all rooms.
"""

import ast
import importlib
import logging
import math
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from tandem.config.model import LIVE_SECTIONS, section_model
from tandem.runtime.errors import InvalidRequestError, ProtocolError
from tandem.runtime.wire.bounds import LARGEST_REAL, MAX_COUNT, Message
from tandem.runtime.wire.cluster_messages import LoadReport, StepCosts
from tandem.runtime.wire.decoding import (
    RefusalLog,
    decode_json,
    decode_value,
    decoder,
    json_decoder,
)
from tandem.runtime.wire.messages import SamplingParams, encode
from tests.malformed import every_message
from tests.test_layout import ROOMS, ROOT, sources

# Files and folders that decode with msgspec themselves, and from whom: no process of the cluster.
OWN_DECODING = {
    "decode/explanations.py": "what this worker keeps of its own requests",
    "engine/execution/follower": "ranks of one worker, over a pair of sockets",
    "transfer/agents/orders.py": "ranks of one worker, over a pair of sockets",
    "frontend/anthropic": "a client's body",
    "frontend/bodies": "a client's body, whose parts and sizes are counted",
    "frontend/chat": "a client's body",
    "frontend/generation/plan.py": "a client's header",
    "frontend/openai": "a client's body",
    "frontend/tokens/chat_forms.py": "a client's history",
    "frontend/responses": "a client's body, and what this frontend stored",
    "frontend/text": "a client's body, and objects of a text model, which go on to the client",
    "grammar": "a client's grammar, and the worker's own child",
    "runtime/local/fork": "a launcher and its child, over a pair of sockets",
    "runtime/wire/sampling_defaults.py": "a file of a model folder",
    "launch/simulation/source.py": "a file of the person at the terminal",
    "launch/slurm": "private files of a deployment",
    "sdk/engine/metrics.py": "the worker's own engine",
    "sdk/health/system_server.py": "an operator's body",
    "sdk/wire/token_requests.py": "the worker's own engine",
    "vllm/controls.py": "an operator's body",
    "vllm/load.py": "the worker's own engine",
}
DECODERS = {
    "msgspec.convert",
    *(f"msgspec.{form}.{name}" for form in ("json", "msgpack") for name in ("decode", "Decoder")),
}
BOUNDLESS = (bool, NoneType)  # they have no size


def messages() -> list[type[Message]]:
    """All messages of all rooms, the modules that declare some imported."""
    for room in ROOMS:
        for path in sources(room):
            if declarations(path):
                parts = path.relative_to(ROOT).with_suffix("").parts
                importlib.import_module(".".join(("tandem", *parts)))
    return every_message()


@cache
def declarations(path: Path) -> list[str]:
    """The names of classes whose base is a message by its name."""
    text = path.read_text()
    tree = ast.walk(ast.parse(text, str(path))) if "Message" in text else ()
    classes = [node for node in tree if isinstance(node, ast.ClassDef)]
    return [each.name for each in classes if "Message" in map(ast.unparse, each.bases)]


def unbounded(kind: Any, metas: tuple[msgspec.Meta, ...] = ()) -> Iterator[str]:
    """What has no bound in the type of a field."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        given = tuple(each for each in kind.__metadata__ if isinstance(each, msgspec.Meta))
        yield from unbounded(kind.__origin__, (*metas, *given))
    elif origin in (Union, UnionType) or (origin is tuple and Ellipsis not in args):
        for each in args:
            yield from unbounded(each)
    elif origin in (list, dict):
        if not any(meta.max_length is not None for meta in metas):
            yield f"{origin.__name__} without max_length"
        for each in args:
            yield from unbounded(each)
    elif kind in (str, bytes):
        if not any(meta.max_length is not None for meta in metas):
            yield f"{kind.__name__} without max_length"
    elif kind in (int, float):
        if not any(is_bounded(meta, kind) for meta in metas):
            yield f"{kind.__name__} without bounds"
    elif kind is Any:
        if not any((meta.extra or {}).get("bound") for meta in metas):
            yield "any value, without a word on what bounds it"
    elif not (
        origin is Literal
        or kind in BOUNDLESS
        or kind is msgspec.Raw  # decoded by `decode_value`
        or isinstance(kind, TypeVar)  # its types are messages
        or (isinstance(kind, type) and issubclass(kind, Message | Enum))
    ):
        yield f"{kind}, which is no type of a message"


def is_bounded(meta: msgspec.Meta, kind: type) -> bool:
    least = meta.ge if meta.ge is not None else meta.gt
    most = meta.le if meta.le is not None else (meta.extra_json_schema or {}).get("maximum")
    are_finite = least is not None and most is not None and math.isfinite(most - least)
    return are_finite and (kind is int or meta.le is not None)


def test_every_field_of_every_message_has_a_bound() -> None:
    found = messages()
    declared = {each for room in ROOMS for path in sources(room) for each in declarations(path)}
    assert len(found) > 40 and declared <= {each.__name__ for each in found}
    missing = [
        f"{kind.__module__}.{kind.__name__}.{name}: {flaw}"
        for kind in found
        for name, hint in get_type_hints(kind, include_extras=True).items()
        if name in kind.__struct_fields__
        for flaw in unbounded(hint)
    ]
    assert not missing


@pytest.mark.parametrize(
    "hint",
    [int, float, str, bytes, list, list[int], dict[str, int], Any, tuple[int, int], int | None,
     Annotated[list[int], msgspec.Meta(max_length=1)], Annotated[int, msgspec.Meta(ge=0)],
     Annotated[float, msgspec.Meta(le=0)], tuple[bool, ...], set[bool]],
    ids=str,
)  # fmt: skip
def test_the_search_finds_what_has_no_bound(hint: Any) -> None:
    assert list(unbounded(hint))


def test_what_a_peer_sent_is_decoded_in_one_place() -> None:
    allowed = ("bench/", "runtime/wire/decoding.py", *OWN_DECODING)
    for path in (path for room in ROOMS for path in sources(room)):
        name = str(path.relative_to(ROOT))
        if not name.startswith(allowed):
            assert not list(decodings(path)), f"{name}: use tandem.runtime.wire.decoding"


def decodings(path: Path) -> Iterator[str]:
    if "msgspec" not in (text := path.read_text()):
        return
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            if called in DECODERS:
                yield called


@pytest.mark.parametrize("section", LIVE_SECTIONS)
def test_every_number_that_is_set_live_has_bounds(section: str) -> None:
    for name, info in section_model(section).model_fields.items():
        if {int, float} & {info.annotation, *get_args(info.annotation)}:
            kinds = {type(each).__name__.lower() for each in info.metadata}
            assert kinds & {"ge", "gt"} and kinds & {"le", "lt"}, f"{section}.{name}"


LOAD = LoadReport("a", "e", "both", 0, 0, 0, 0, 0, 0)
COSTS = StepCosts((1e-3,) * 3, (1e-3,) * 3, 0.1, 100, 100)


@pytest.mark.parametrize("field", ["num_running", "decode_context"])
@pytest.mark.parametrize("number", [-1, MAX_COUNT + 1, 0.5, None, "1"])
def test_a_number_out_of_bounds_is_refused_with_its_field(field: str, number: object) -> None:
    report = msgspec.structs.replace(LOAD, **{field: number})
    with pytest.raises(ProtocolError, match=rf"malformed LoadReport: .*\.{field}") as caught:
        decoder(LoadReport)(encode(report))
    assert caught.value.param == field


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e300, -1e-9])
def test_no_float_of_a_message_is_infinite_or_no_number(number: float) -> None:
    costs = msgspec.structs.replace(COSTS, max_step_s=number)
    with pytest.raises(ProtocolError, match="max_step_s"):
        decoder(LoadReport)(encode(msgspec.structs.replace(LOAD, costs=costs)))
    with pytest.raises(InvalidRequestError, match="temperature"):
        decoder(SamplingParams, InvalidRequestError)(encode(SamplingParams(temperature=number)))


def test_messages_at_their_bounds_pass() -> None:
    full = msgspec.structs.replace(LOAD, decode_context=MAX_COUNT, costs=COSTS)
    assert decoder(LoadReport)(encode(full)) == full
    sampling = SamplingParams(temperature=LARGEST_REAL, seed=2**64 - 1)
    assert decoder(SamplingParams)(encode(sampling)) == sampling


def test_a_sender_that_goes_on_lying_has_one_line_for_each_field(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = RefusalLog(logging.getLogger("tandem"), "a load report")
    for number in range(1, 100):
        for field in ("num_running", "num_waiting"):
            with pytest.raises(ProtocolError) as caught:
                decoder(LoadReport)(encode(msgspec.structs.replace(LOAD, **{field: -number})))
            refusals.note("a\nb", caught.value)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and lines[0].startswith(r"dropped a load report of a\nb: malformed")


NESTED_JSON = [
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"[" * 100 + b"]" * 100,
    b'{"a":{"b":' + b"[" * 80,
    b"[" * 70 + b'"' + rb"\"" * 500_000,
    b"[" + b"[]," * 500_000 + b"[" * 64,
]
NESTED_MSGPACK = [b"\x91" * 100_000, b"\x81\xa1a" * 100_000]


@pytest.mark.parametrize("data", [*NESTED_JSON, b"", b"\xff\xfe", b"[1", b"nan", b"1" * 100_000])
def test_json_that_is_nested_or_malformed_is_refused_in_one_line(data: bytes) -> None:
    for decode in (decode_json, json_decoder(StepCosts)):
        with pytest.raises(ProtocolError) as caught:
            decode(data)
        assert len(caught.value.message) < 500 and caught.value.message.isprintable()


@pytest.mark.parametrize("data", [*NESTED_MSGPACK, b"", b"\xc1", b"\xdd\xff\xff\xff\xff"])
def test_msgpack_that_is_nested_or_malformed_is_refused_in_one_line(data: bytes) -> None:
    for decode in (decode_value, decoder(LoadReport), decoder(LoadReport | SamplingParams)):
        with pytest.raises(ProtocolError) as caught:
            decode(data)
        assert len(caught.value.message) < 500 and caught.value.message.isprintable()


def test_brackets_in_strings_are_no_nesting() -> None:
    text = "[{" * 1000 + '\\"' + "[" * 100
    assert decode_json(msgspec.json.encode({"a": text})) == {"a": text}
    assert decode_json(b"[" * 60 + b"]" * 60) and decode_json(b"[" + b"[],[{}]," * 99 + b"[]]")
