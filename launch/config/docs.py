"""Writes docs/configuration.md from the config models.

Run it with `python -m tandem.launch.config.docs`.
"""

import inspect
import json
import re
import sys
import types
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tandem.launch.config.model import LIVE_SECTIONS, TandemConfig, section_model, section_names
from tandem.launch.config.sources import env_name

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

This page is generated from the config models by `python -m tandem.launch.config.docs`; a
test fails when it is out of date.

Every value comes from the strongest source that names it, weakest first:

1. the default below,
2. a role's `config` in the topology file of `tandem serve`,
3. the YAML file of `--config`: sections at the top level, keys below them,
4. the environment: `TANDEM_SECTION__KEY`,
5. flags: `--section.key=value`, and options such as `--port` that stand for one.

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
tandem config show          # every value, and where it came from
```

An unknown key is an error that names the nearest known one; a bad value is an error that names the
key, the value, where it stands and the reason. `null` as text clears a value that may be empty.
"""

LIVE_NOTE = """\
These keys are live: `tandem config set {section}.KEY VALUE` reaches every worker of a running
cluster at once, `tandem config unset` takes it back, `tandem config watch` shows changes. A bad
value is refused with the reason and changes nothing.
"""


def render() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(_render_section(name) for name in section_names())])


def main() -> None:
    """Writes the page, and says where."""
    DOCUMENT.write_text(render(), encoding="utf-8")
    sys.stdout.write(f"{DOCUMENT}\n")


def _render_section(name: str) -> str:
    model = section_model(name)
    lines = [f"## {name}", "", f"{_summary(model)}", ""]
    if name in LIVE_SECTIONS:
        lines += [LIVE_NOTE.format(section=name)]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    comments = _comments(model)
    for key, field in model.model_fields.items():
        meaning = field.description or comments.get(key, "")
        lines.append(
            f"| `{name}.{key}`<br>`{env_name(f'{name}.{key}')}`<br>`--{name}.{key}=` "
            f"| {_escape(_type_text(field))} | `{_default_text(name, key)}` "
            f"| {_escape(meaning)} |"
        )
    return "\n".join([*lines, ""])


def _summary(model: type[BaseModel]) -> str:
    return (inspect.getdoc(model) or "").split("\n\n", 1)[0].replace("\n", " ")


def _comments(model: type[BaseModel]) -> dict[str, str]:
    """The comment on each field's own line: the description of those that have no other."""
    found = re.findall(r"^    (\w+):[^#\n]*#\s*(.+)$", inspect.getsource(model), re.MULTILINE)
    return dict(found)


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
