"""Model folders in which one thing was changed at random: a value, a key, bytes, a header."""

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 255, 2**31, 2**63, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1e-300, 1e300, float("nan"), float("inf")),
    *("", "x", "__init__", "../config.json", "\x00", "\ud800", "x" * 10**5, "<|im_end|>"),
    *([], [None], [1, 2], [[]], list(range(10**4)), {}, {"a": 1}, {"rope_type": "yarn"}),
)
TEMPLATES = (
    *("{%", "{{", "{{ 1 / 0 }}", "{{ x.y.z }}", "{% for m in messages %}", "{% raw %}", "\x00"),
    *("{{ messages }}", "{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}", ""),
    *("{% include 'x' %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ '}}' }}"),
)


def _places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value within one; of a long list or object, of a few."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, each in items[:40]:
        yield (*before, key)
        if isinstance(each, dict | list):
            yield from _places(each, (*before, key))


def _change_json(path: Path, draw: random.Random) -> str:
    data = json.loads(path.read_text())
    *way, last = draw.choice(list(_places(data)))
    part = data
    for key in way:
        part = part[key]
    kind = draw.choice(("value", "value", "value", "gone", "other", "more"))
    if kind == "value":
        part[last] = copy.deepcopy(draw.choice(ODD))
    elif kind == "gone":
        del part[last]
    elif kind == "other":  # a value from elsewhere in the file
        *from_way, from_last = draw.choice(list(_places(data)))
        source = data
        for key in from_way:
            source = source[key]
        part[last] = copy.deepcopy(source[from_last])
    elif isinstance(part[last], int | float) and not isinstance(part[last], bool):
        part[last] = part[last] * draw.choice((2, -1, 0.5)) + draw.choice((0, 1, -1))
    path.write_text(json.dumps(data))
    return f"{path.name}: {[*way, last]}: {kind}: {str(part)[:60]}"


def _change_bytes(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    kind = draw.choice(("flip", "cut", "twice", "deep", "empty"))
    most = min(len(data), 4000)
    at = draw.randrange(most)
    if kind == "flip":
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(most)] = draw.randrange(256)
    elif kind == "cut":
        del data[draw.choice((at, len(data) - at)) :]
    elif kind == "twice":
        data[at:at] = data[at : at + draw.randrange(200)]
    elif kind == "deep":
        data = bytearray(b"[" * 100_000)
    else:
        data = bytearray()
    path.write_bytes(data)
    return f"{path.name}: bytes: {kind} at {at}"


def _change_header(path: Path, draw: random.Random) -> str:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    name = draw.choice([each for each in header if each != "__metadata__"])
    kind = draw.choice(("dtype", "shape", "offsets", "gone", "size", "rest"))
    if kind == "dtype":
        header[name]["dtype"] = draw.choice(("F16", "BF16", "I32", "F8_E4M3", "U8", "X", 7))
    elif kind == "shape":
        header[name]["shape"] = draw.choice(([], [0], [2**62, 4], [-1], "x", [1.5]))
    elif kind == "offsets":
        header[name]["data_offsets"] = draw.choice(([0, 0], [0, 2**63], [9, 1], [-8, 8], None))
    elif kind == "gone":
        del header[name]
    elif kind == "rest":
        rest = rest[: draw.randrange(len(rest))]
    written = json.dumps(header).encode()
    num_bytes = draw.choice((0, 1, 2**40, 2**63)) if kind == "size" else len(written)
    path.write_bytes(num_bytes.to_bytes(8, "little") + written + rest)
    return f"{path.name}: {name}: {kind}"


def _change_template(folder: Path, draw: random.Random) -> str:
    path = folder / "tokenizer_config.json"
    data = json.loads(path.read_text())
    template, new = data["chat_template"], draw.choice(TEMPLATES)
    at = draw.randrange(len(template))
    data["chat_template"] = draw.choice((template[:at], new, template[:at] + new + template[at:]))
    path.write_text(json.dumps(data))
    return f"chat_template: {new!r} at {at}"


def mutate(source: Path, target: Path, seed: int) -> str:
    """Copy a folder with one thing in it changed; return what."""
    draw = random.Random(seed)
    shutil.copytree(source, target)
    kind = draw.choice(("json", "json", "json", "json", "bytes", "header", "template"))
    named = [target / name for name in JSON_FILES if (target / name).exists()]
    shards = sorted(target.glob("*.safetensors"))
    if kind == "json":
        weights = [6 if path.name == "config.json" else 1 for path in named]
        return _change_json(draw.choices(named, weights)[0], draw)
    if kind == "bytes":
        return _change_bytes(draw.choice((*named, *shards)), draw)
    if kind == "header":
        return _change_header(draw.choice(shards), draw)
    return _change_template(target, draw)
