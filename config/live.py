"""Live values of the config: checked before they are written, and read from etcd."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from tandem.config.model import (
    LIVE_KEYS,
    LIVE_SECTIONS,
    EffectiveConfig,
    compose,
    find_field,
    is_secret,
    section_model,
)
from tandem.config.sources import Setting
from tandem.runtime.errors import ConfigError, ProtocolError
from tandem.runtime.printable import masked
from tandem.runtime.process.lifecycle import started
from tandem.runtime.store.discovery import (
    Discovery,
    config_prefix,
)
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.runtime.wire.decoding import decode_json


def parse_live(effective: EffectiveConfig, key: str, text: str) -> Any:
    """Return the value of a live key in JSON types. Raise ConfigError for a bad one."""
    require_live(key)
    return plain(effective.with_settings([Setting(key, text, "new value", is_text=True)]), key)


def require_live(key: str) -> None:
    """Raise ConfigError for a key that does not exist, or cannot be changed while serving."""
    find_field(Setting(key, None, "command line"))
    if key.partition(".")[0] not in LIVE_SECTIONS and key not in LIVE_KEYS:
        raise ConfigError(
            f"{key} is read at the start only: restart to change it; "
            f"live keys are {', '.join(live_keys())}",
            param=key,
        )


def live_keys() -> list[str]:
    names = [f"{s}.{name}" for s in LIVE_SECTIONS for name in section_model(s).model_fields]
    return [*names, *LIVE_KEYS]


def plain(effective: EffectiveConfig, key: str) -> Any:
    """Return a value in JSON types; secrets are masked, and passwords in URLs."""
    section, _, name = key.partition(".")
    if is_secret(find_field(Setting(key, None, ""))):
        return None if effective.value(key) is None else "***"
    value = getattr(effective.config, section).model_dump(mode="json")[name]
    return masked(value) if isinstance(value, str) else value


def live_settings(
    namespace: str, items: Mapping[str, bytes], on_bad: Callable[[str], None], model: str = ""
) -> list[Setting]:
    """Return the valid live values among `items`; call `on_bad` for every other.

    With a `model`, its own values stand last and win.
    """
    settings: list[Setting] = []
    models_own = config_prefix(namespace, model)
    for path, data in sorted(items.items(), key=lambda item: item[0].startswith(models_own)):
        key = path.removeprefix(models_own).removeprefix(config_prefix(namespace))
        if "/" in key:
            continue  # of another model
        setting = Setting(key, None, f"live, etcd {path}")
        try:
            setting = Setting(key, decode_json(data), setting.origin)
            check_live(setting)
        except (ProtocolError, ConfigError) as error:
            on_bad(f"{key}: {error}")
            continue
        settings.append(setting)
    return settings


def check_live(setting: Setting) -> None:
    """Raise ConfigError for a live value that would be refused."""
    require_live(setting.key)
    compose([setting])


def connected(effective: EffectiveConfig) -> AbstractAsyncContextManager[Discovery]:
    """Connect to the cluster's etcd. Raise ServiceError naming its address."""
    # a person is waiting: give up soon
    runtime = effective.config.runtime.model_copy(update={"connect_attempts": 2})
    return started(EtcdDiscovery(runtime))
