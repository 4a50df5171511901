"""Where config values come from: a YAML file, the environment, flags. Each keeps its place."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tandem.runtime.errors import ConfigError
from tandem.runtime.local_clusters import LocalCluster

ENV_PREFIX = "TANDEM_"
ENV_SEPARATOR = "__"
NONE_WORDS = ("null", "none", "~", "")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value somebody gave: `origin` is what to show, such as `tandem.yaml:12`.

    `is_text`: the value is a string as typed, not yet of its key's type.
    """

    key: str
    value: Any
    origin: str
    is_text: bool = False


def from_file(path: Path) -> list[Setting]:
    """The settings of a YAML file, whose top level is sections of keys."""
    root = read_yaml(path)
    settings: list[Setting] = []
    for section, _, value in entries(root, path, "the file"):
        if is_empty(value):
            continue
        for name, key_line, node in entries(value, path, section):
            where = f"{path}:{key_line}"
            settings.append(Setting(f"{section}.{name}", plain_value(node, path), where))
    return settings


def from_environment(environment: Mapping[str, str], sections: list[str]) -> list[Setting]:
    """The settings in variables named TANDEM_SECTION__KEY.

    A variable such as TANDEM_DISAGG_POLICY, which lacks an underscore, is an error, not silence.
    """
    settings: list[Setting] = []
    for name in sorted(environment):
        if not name.startswith(ENV_PREFIX):
            continue
        section, separator, key = name.removeprefix(ENV_PREFIX).lower().partition(ENV_SEPARATOR)
        if separator:
            settings.append(Setting(f"{section}.{key}", environment[name], name, is_text=True))
            continue
        meant = next((s for s in sections if section.startswith(f"{s}_")), None)
        if meant is not None:
            right = env_name(f"{meant}.{section.removeprefix(f'{meant}_')}")
            raise ConfigError(f"environment variable {name}: did you mean {right}?", param=name)
    return settings


def from_flags(arguments: Iterable[str]) -> list[Setting]:
    """The settings in `--section.key=value` and `--section.key value`."""
    settings: list[Setting] = []
    words = iter(arguments)
    for word in words:
        name, has_value, value = word.partition("=")
        if not name.startswith("--") or "." not in name:
            raise ConfigError(f"unexpected argument {word}; config flags read --section.key=value")
        if not has_value:
            following = next(words, None)
            if following is None or following.startswith("--"):
                raise ConfigError(f"{name} needs a value: {name}=VALUE", param=name)
            value = following
        key = name.removeprefix("--").replace("-", "_")
        settings.append(Setting(key, value, f"flag {name}", is_text=True))
    return settings


def from_cluster(cluster: LocalCluster) -> list[Setting]:
    """The settings that lead to a cluster of this machine."""
    origin = f"tandem serve, pid {cluster.pid}"
    values = cluster.runtime_values().items()
    return [Setting(f"runtime.{name}", value, origin) for name, value in values]


def parse_text(setting: Setting, wants_structure: bool, allows_none: bool) -> Setting:
    """A setting typed as text, as a value: null words become None, lists and mappings are read."""
    if not setting.is_text:
        return setting
    text = str(setting.value)
    value: Any = text
    if allows_none and text.strip().lower() in NONE_WORDS:
        value = None
    elif wants_structure:
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as exc:
            reason = f"{setting.key} = {text!r} ({setting.origin}): not valid YAML"
            raise ConfigError(reason, param=setting.key) from exc
    return replace(setting, value=value, is_text=False)


def env_name(key: str) -> str:
    """The environment variable of a key."""
    return ENV_PREFIX + key.replace(".", ENV_SEPARATOR).upper()


def nearest_word(word: str, known: Iterable[str]) -> str:
    """`did you mean X?` for the known word that is like `word`, else the list of them."""
    words = list(known)
    found = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"did you mean {found[0]}?" if found else f"known are {', '.join(words)}"


# ---- YAML with line numbers -------------------------------------------------------------------


def read_yaml(path: Path) -> yaml.Node | None:
    """The node tree of a YAML file; None when it is empty. Raises ConfigError naming the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise ConfigError(f"cannot read {path}: {reason}") from exc
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark else 1
        raise ConfigError(f"{path}:{line}: {exc.problem or 'not valid YAML'}") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def entries(node: yaml.Node | None, path: Path, what: str) -> Iterator[tuple[str, int, yaml.Node]]:
    """(key, line, value node) of a mapping. Raises ConfigError when it is none or repeats a key."""
    if node is None:
        return
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{line}: {what} must be a mapping of keys to values")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{path}:{line}: a key of {what} must be a word")
        if key_node.value in seen:
            raise ConfigError(f"{path}:{line}: {key_node.value} stands twice in {what}")
        seen.add(key_node.value)
        yield key_node.value, line, value_node


def plain_value(node: yaml.Node, path: Path) -> Any:
    """The Python value of a node: strings, numbers, lists, mappings, None."""
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: {exc}") from exc
    finally:
        loader.dispose()


def is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"
