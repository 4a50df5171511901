"""Sources of config values: a YAML file, the environment, flags. Each value keeps its origin."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tandem.config.flags import Flag
from tandem.runtime.errors import ConfigError
from tandem.runtime.local.local_clusters import LocalCluster
from tandem.runtime.process.names import config_variables, means_none


@dataclass(frozen=True, slots=True)
class Setting:
    """One given value; `origin` is its place for users, such as `tandem.yaml:12`.

    `is_text`: the value is a string as typed, not yet of its key's type.
    """

    key: str
    value: Any
    origin: str
    is_text: bool = False


def from_file(path: Path) -> list[Setting]:
    """Return the settings of a YAML file, whose top level is sections of keys."""
    root = read_yaml(path)
    settings: list[Setting] = []
    for section, _, value in entries(root, path, "the file"):
        if is_empty(value):
            continue
        for name, key_line, node in entries(value, path, section):
            where = f"{path}:{key_line}"
            settings.append(Setting(f"{section}.{name}", plain_value(node, path), where))
    return settings


def from_environment(environment: Mapping[str, str], sections: Sequence[str]) -> list[Setting]:
    """Return the settings in variables named TANDEM_SECTION__KEY, after those in shared ones.

    Raise ConfigError for a variable such as TANDEM_DISAGG_POLICY, which lacks an underscore.
    """
    variables = config_variables(environment, sections)
    return [Setting(key, text, name, is_text=True) for key, name, text in variables]


def from_flags(flags: Iterable[Flag]) -> list[Setting]:
    """Return the settings in flags; a key may be typed with hyphens."""
    return [
        Setting(flag.path.replace("-", "_"), flag.value, f"flag {flag.name}", is_text=True)
        for flag in flags
    ]


def from_cluster(cluster: LocalCluster) -> list[Setting]:
    """Return the settings that lead to a cluster of this machine."""
    origin = f"tandem serve, pid {cluster.pid}"
    values = cluster.runtime_values().items()
    return [Setting(f"runtime.{name}", value, origin) for name, value in values]


def parse_text(setting: Setting, wants_structure: bool, allows_none: bool) -> Setting:
    """Return a setting typed as text with its value: null words become None, YAML is parsed."""
    if not setting.is_text:
        return setting
    text = str(setting.value)
    value: Any = text
    if allows_none and means_none(text):
        value = None
    elif wants_structure:
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as exc:
            reason = f"{setting.key} = {text!r} ({setting.origin}): not valid YAML"
            raise ConfigError(reason, param=setting.key) from exc
    return replace(setting, value=value, is_text=False)


# ---- YAML with line numbers -------------------------------------------------------------------


def read_yaml(path: Path) -> yaml.Node | None:
    """Return the node tree of a YAML file; None when it is empty. Raise ConfigError with line."""
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


def entries(
    node: yaml.Node | None, path: Path, subject: str
) -> Iterator[tuple[str, int, yaml.Node]]:
    """Yield (key, line, value node) of a mapping.

    Raise ConfigError when the node is no mapping or repeats a key.
    """
    if node is None:
        return
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{line}: {subject} must be a mapping of keys to values")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{path}:{line}: a key of {subject} must be a word")
        if key_node.value in seen:
            raise ConfigError(f"{path}:{line}: {key_node.value} stands twice in {subject}")
        seen.add(key_node.value)
        yield key_node.value, line, value_node


def plain_value(node: yaml.Node, path: Path) -> Any:
    """Return the Python value of a node: strings, numbers, lists, mappings, None."""
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: {exc}") from exc
    finally:
        loader.dispose()


def is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"
