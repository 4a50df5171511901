"""Tandem's configuration: one frozen model per room, composed, and the origin of every value.

Sources, weakest first: defaults, the role's entry in a topology, the YAML file of `--config`, the
environment (NATS_SERVER, ETCD_ENDPOINTS and DYN_LOG, then `TANDEM_SECTION__KEY`), flags
(`--section.key=value`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import pydantic
from pydantic import BaseModel, ConfigDict, SecretStr
from pydantic.fields import FieldInfo

from tandem.config.epp import EppConfig
from tandem.config.flags import Flag
from tandem.config.planner import PlannerConfig
from tandem.config.sources import (
    Setting,
    from_environment,
    from_file,
    from_flags,
    parse_text,
)
from tandem.decode.config import DisaggConfig
from tandem.engine.config import EngineConfig
from tandem.frontend.config import FrontendConfig
from tandem.prefill.config import PrefillConfig
from tandem.queue.config import QueueConfig
from tandem.router.config import RouterConfig
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError
from tandem.runtime.process.names import nearest, variable_name
from tandem.transfer.config import TransferConfig

LIVE_SECTIONS = (
    "disagg",
    "planner",
)  # sections whose keys `tandem config set` changes while serving
LIVE_KEYS = ("runtime.log_level",)  # live keys of other sections


class TandemConfig(BaseModel):
    """The configuration of a process of Tandem, one section per room."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    runtime: RuntimeConfig = RuntimeConfig.model_validate({})
    engine: EngineConfig = EngineConfig.model_validate({})
    transfer: TransferConfig = TransferConfig.model_validate({})
    queue: QueueConfig = QueueConfig.model_validate({})
    prefill: PrefillConfig = PrefillConfig.model_validate({})
    disagg: DisaggConfig = DisaggConfig.model_validate({})
    frontend: FrontendConfig = FrontendConfig.model_validate({})
    router: RouterConfig = RouterConfig.model_validate({})
    planner: PlannerConfig = PlannerConfig.model_validate({})
    epp: EppConfig = EppConfig.model_validate({})


@dataclass(frozen=True, slots=True)
class EffectiveConfig:
    """A validated config, and the setting of each key that is not at its default."""

    config: TandemConfig
    settings: Mapping[str, Setting]  # "section.key" |-> the setting that won

    def origin(self, key: str) -> str:
        setting = self.settings.get(key)
        return setting.origin if setting else "default"

    def value(self, key: str) -> Any:
        section, _, name = key.partition(".")
        return getattr(getattr(self.config, section), name)

    def variables(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the environment that sets `keys` to their values here, secrets included."""
        values = {key: self.value(key) for key in keys}
        return {
            variable_name(key): "null"
            if value is None
            else value.get_secret_value()
            if isinstance(value, SecretStr)
            else str(value)
            for key, value in values.items()
        }

    def with_settings(self, settings: Iterable[Setting]) -> "EffectiveConfig":
        """Return the config with `settings` in place of weaker ones."""
        return compose([*self.settings.values(), *settings])

    def with_defaults(self, settings: Iterable[Setting]) -> "EffectiveConfig":
        """Return the config with `settings` for keys that have no other setting."""
        return compose([*settings, *self.settings.values()])


def load_config(
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Iterable[Flag] = (),
) -> EffectiveConfig:
    """Read all sources. Raise ConfigError naming key, value, origin and reason."""
    settings: list[Setting] = []
    if file is not None:
        settings += from_file(file)
    if environment is not None:
        settings += from_environment(environment, section_names())
    settings += from_flags(flags)
    return compose(settings)


def compose(settings: Iterable[Setting]) -> EffectiveConfig:
    """Validate settings, weakest first, into a config; later ones win."""
    winners: dict[str, Setting] = {}
    for setting in settings:
        field = find_field(setting)
        parsed = parse_text(setting, wants_structure(field), allows_none(field))
        winners.pop(setting.key, None)
        winners[setting.key] = parsed
    sections: dict[str, BaseModel] = {}
    for name in section_names():
        mine = {k.partition(".")[2]: s for k, s in winners.items() if k.startswith(f"{name}.")}
        if mine:
            sections[name] = _build_section(name, mine)
    return EffectiveConfig(TandemConfig(**sections), winners)


def section_names() -> list[str]:
    return list(TandemConfig.model_fields)


def section_model(name: str) -> type[BaseModel]:
    """Return the model of a section."""
    model = TandemConfig.model_fields[name].annotation
    assert isinstance(model, type) and issubclass(model, BaseModel)
    return model


def all_keys() -> list[str]:
    """Return every key, in the order of the models."""
    return [f"{s}.{name}" for s in section_names() for name in section_model(s).model_fields]


def find_field(setting: Setting) -> FieldInfo:
    """Return the field of a setting. Raise ConfigError naming the nearest known key."""
    section, _, name = setting.key.partition(".")
    if section in TandemConfig.model_fields:
        field = section_model(section).model_fields.get(name)
        if field is not None:
            return field
    kind = "key" if name else "section"
    raise ConfigError(
        f"unknown {kind} {setting.key} ({setting.origin}); {_nearest_key(setting.key)}",
        param=setting.key,
    )


def _nearest_key(key: str) -> str:
    """Return `did you mean X?`, also for the right name in the wrong section; else the sections."""
    name = key.partition(".")[2]
    by_name = {known.partition(".")[2]: known for known in reversed(all_keys())}
    found = nearest(key, all_keys() if name else section_names())
    if found is None and (same := nearest(name, by_name, similarity=0.8)):
        found = by_name[same]
    return f"did you mean {found}?" if found else f"sections are {', '.join(section_names())}"


def allows_none(field: FieldInfo) -> bool:
    return NoneType in _alternatives(field.annotation)


def wants_structure(field: FieldInfo) -> bool:
    """Return True for lists and mappings, which text must be parsed into."""
    kinds = [get_origin(kind) or kind for kind in _alternatives(field.annotation)]
    return any(kind in (list, dict, tuple, set, frozenset) for kind in kinds)


def is_secret(field: FieldInfo) -> bool:
    return SecretStr in _alternatives(field.annotation)


def _alternatives(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _alternatives(part)]
    return [annotation]


def _build_section(name: str, mine: Mapping[str, Setting]) -> BaseModel:
    try:
        return section_model(name).model_validate({k: s.value for k, s in mine.items()})
    except pydantic.ValidationError as exc:
        raise _explained(name, mine, exc) from exc


def _explained(
    section: str, mine: Mapping[str, Setting], exc: pydantic.ValidationError
) -> ConfigError:
    reasons: list[str] = []
    first_key = None
    for error in exc.errors(include_url=False):
        field = str(error["loc"][0]) if error["loc"] else ""
        key = f"{section}.{field}" if field else section
        first_key = first_key or key
        reason = _lower_first(error["msg"].removeprefix("Value error, "))
        setting = mine.get(field)
        if setting is None:
            reasons.append(f"{key}: {reason}")
            continue
        hidden = is_secret(section_model(section).model_fields[field])
        shown = "***" if hidden else repr(setting.value)
        line = f"{key} = {shown} ({setting.origin}): {reason}"
        if line not in reasons:
            reasons.append(line)
    return ConfigError("; ".join(reasons), param=first_key)


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
