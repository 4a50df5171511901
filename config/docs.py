"""Writes docs/configuration.md from the config models: `python -m tandem.config.docs`."""

import inspect
import json
import sys
import types
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tandem.config.model import LIVE_SECTIONS, TandemConfig, section_model, section_names

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

This page is generated from the config models by `python -m tandem.config.docs`; a
test fails when it is out of date.

Every value comes from the strongest source that names it, weakest first:

1. the default below,
2. a role's `config` in the topology file of `tandem serve`,
3. the YAML file of `--config`: sections at the top level, keys below them,
4. the environment,
5. flags, and options such as `--port` that stand for a flag.

The tables below name a key as `section.key`. For `disagg.max_local_prefill_length` the variable is
`TANDEM_DISAGG__MAX_LOCAL_PREFILL_LENGTH` (upper case, two underscores between section and key), and
the flag is `--disagg.max_local_prefill_length=512`. `NATS_SERVER`, `ETCD_ENDPOINTS` and `DYN_LOG`
set `runtime.nats_url`, `runtime.etcd_endpoints` and `runtime.log_level`; the longer name wins where
both are set. `tandem serve` starts no NATS or etcd of its own where an address of it is given.

```yaml
# tandem.yaml
disagg:
  policy: threshold
  max_local_prefill_length: 512
engine:
  max_num_seqs: 64
```

```sh
tandem serve bundled --config tandem.yaml --disagg.max_local_prefill_length=256
TANDEM_DISAGG__POLICY=always_local tandem serve
tandem config show          # every value, its origin, and whether it is in force
```

An unknown key is an error that names the nearest known key; a bad value is an error that names the
key, the value, its origin and the reason. `null` as text clears a value that may be empty.
"""

LIVE_NOTE = """\
These keys are live: `tandem config set {section}.KEY VALUE` changes every worker of a running
cluster at once, `tandem config unset` takes that back, `tandem config watch` shows changes. A bad
value is refused with the reason and changes nothing.
"""


def render() -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION, *(_render_section(name) for name in section_names())])


def main() -> None:
    """Write the page and print its path."""
    DOCUMENT.write_text(render(), encoding="utf-8")
    sys.stdout.write(f"{DOCUMENT}\n")


def _render_section(name: str) -> str:
    model = section_model(name)
    lines = [f"## {name}", "", f"{_summary(model)}", ""]
    if name in LIVE_SECTIONS:
        lines += [LIVE_NOTE.format(section=name)]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in model.model_fields.items():
        lines.append(
            f"| `{name}.{key}` | {_escape(_type_text(field))} | `{_default_text(name, key)}` "
            f"| {_escape(field.description or '')} |"
        )
    return "\n".join([*lines, ""])


def _summary(model: type[BaseModel]) -> str:
    return (inspect.getdoc(model) or "").split("\n\n", 1)[0].replace("\n", " ")


def _type_text(field: FieldInfo) -> str:
    limits = [_limit_text(limit) for limit in field.metadata]
    return ", ".join([_annotation_text(field.annotation), *filter(None, limits)])


def _annotation_text(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(_annotation_text(part) for part in get_args(annotation))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin is not None:
        inner = ", ".join(_annotation_text(part) for part in get_args(annotation))
        return f"{origin.__name__}[{inner}]"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    names = {type(None): "null", str: "text", int: "integer", float: "number", bool: "true, false"}
    return names.get(annotation, "secret text" if "Secret" in str(annotation) else str(annotation))


def _limit_text(limit: Any) -> str:
    signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
    bounds = [
        f"{sign} {value}"
        for name, sign in signs
        if (value := getattr(limit, name, None)) is not None
    ]
    pattern = getattr(limit, "pattern", None)
    return ", ".join(bounds + ([f"matches `{pattern}`"] if pattern else []))


def _default_text(section: str, key: str) -> str:
    values = getattr(TandemConfig(), section).model_dump(mode="json")
    return json.dumps(values[key])


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
