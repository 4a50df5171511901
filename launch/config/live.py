"""`tandem config`: effective values with their origin, and the live values in etcd."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tandem.launch.config.in_force import mark_not_in_force
from tandem.launch.config.model import (
    LIVE_SECTIONS,
    EffectiveConfig,
    all_keys,
    compose,
    find_field,
    is_secret,
    section_model,
)
from tandem.launch.config.sources import Setting
from tandem.launch.supervise.reporter import wide_console
from tandem.runtime.discovery import Discovery, config_key, config_prefix
from tandem.runtime.errors import ConfigError, ServiceError
from tandem.runtime.etcd import EtcdDiscovery

CALL_TIMEOUT_S = 5.0


def show_config(
    effective: EffectiveConfig, *, file: Path | None, live: bool | None, as_json: bool
) -> None:
    """Print every value and its origin. `live` None: read the cluster where one is known.

    Values of `file` that the cluster of this machine was not started with are marked.
    """
    if live is not False and file is not None:
        effective = mark_not_in_force(effective, file)
    if live is not False and (live or effective.origin("runtime.etcd_endpoints") != "default"):
        try:
            effective = _with_live(effective)
        except ServiceError as error:
            if live:
                raise
            _warn(f"live values are not shown: {error.message}")
    rows = [(key, plain(effective, key), effective.origin(key)) for key in all_keys()]
    if as_json:
        values = {key: {"value": value, "origin": origin} for key, value, origin in rows}
        print(json.dumps(values, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("key", "value", "from"):
        table.add_column(heading, overflow="fold")
    for key, value, origin in rows:
        style = "dim" if origin == "default" else ""
        table.add_row(key, json.dumps(value), origin, style=style)
    wide_console().print(table)


def get_value(effective: EffectiveConfig, key: str) -> None:
    """Print a live key's value in the cluster."""
    require_live(key)
    print(json.dumps(plain(_with_live(effective), key)))


def set_value(effective: EffectiveConfig, key: str, text: str) -> None:
    """Check a live value and write it. Raises ConfigError for a bad one and changes nothing."""
    require_live(key)
    before = _with_live(effective)
    after = before.with_settings([Setting(key, text, "new value", is_text=True)])
    value = plain(after, key)

    async def write(discovery: Discovery) -> None:
        name = config_key(effective.config.runtime.namespace, key)
        await discovery.put_config(name, msgspec.json.encode(value))

    asyncio.run(_call(effective, write))
    print(f"{key} = {json.dumps(value)} (was {json.dumps(plain(before, key))})")


def unset_value(effective: EffectiveConfig, key: str) -> None:
    """Remove a live value: workers return to the value they were started with."""
    require_live(key)

    async def remove(discovery: Discovery) -> None:
        await discovery.delete(config_key(effective.config.runtime.namespace, key))

    asyncio.run(_call(effective, remove))
    print(f"{key} is no longer set in the cluster")


def watch_values(effective: EffectiveConfig) -> None:
    """Print live values and their changes, one line each, until interrupted."""
    asyncio.run(_watch(effective, lambda line: print(line, flush=True)))


async def _watch(effective: EffectiveConfig, emit: Callable[[str], None]) -> None:
    prefix = config_prefix(effective.config.runtime.namespace)

    def changed(key: str, value: bytes | None) -> None:
        name = key.removeprefix(prefix)
        emit(f"{name} = {value.decode()}" if value is not None else f"{name} is unset")

    async with connected(effective) as discovery:
        view = discovery.watch(prefix)
        view.subscribe(changed)
        await asyncio.Event().wait()


def require_live(key: str) -> None:
    """Raise ConfigError for a key that does not exist, or cannot be changed while serving."""
    find_field(Setting(key, None, "command line"))
    if key.partition(".")[0] not in LIVE_SECTIONS:
        raise ConfigError(
            f"{key} is read at the start only: restart to change it; "
            f"live keys are {', '.join(live_keys())}",
            param=key,
        )


def live_keys() -> list[str]:
    return [f"{s}.{name}" for s in LIVE_SECTIONS for name in section_model(s).model_fields]


def plain(effective: EffectiveConfig, key: str) -> Any:
    """Return a value in JSON types; secrets are masked."""
    section, _, name = key.partition(".")
    if is_secret(find_field(Setting(key, None, ""))):
        return None if effective.value(key) is None else "***"
    return getattr(effective.config, section).model_dump(mode="json")[name]


def live_settings(
    namespace: str, items: Mapping[str, bytes], on_bad: Callable[[str], None]
) -> list[Setting]:
    """Return the valid live values among `items`; call `on_bad` for every other."""
    settings: list[Setting] = []
    for path, data in items.items():
        key = path.removeprefix(config_prefix(namespace))
        setting = Setting(key, None, f"live, etcd {path}")
        try:
            setting = Setting(key, msgspec.json.decode(data), setting.origin)
            check_live(setting)
        except (msgspec.DecodeError, ConfigError) as error:
            on_bad(f"{key}: {error}")
            continue
        settings.append(setting)
    return settings


def check_live(setting: Setting) -> None:
    """Raise ConfigError for a live value that would be refused."""
    require_live(setting.key)
    compose([setting])


@asynccontextmanager
async def connected(effective: EffectiveConfig) -> AsyncIterator[Discovery]:
    """Connect to the cluster's etcd. Raises ServiceError naming its address."""
    # a person is waiting: give up soon
    runtime = effective.config.runtime.model_copy(update={"connect_attempts": 2})
    discovery = EtcdDiscovery(runtime)
    await discovery.start()
    try:
        yield discovery
    finally:
        await discovery.close()


async def _call(effective: EffectiveConfig, work: Callable[[Discovery], Awaitable[None]]) -> None:
    async with connected(effective) as discovery, asyncio.timeout(CALL_TIMEOUT_S):
        await work(discovery)


async def _read_live(effective: EffectiveConfig) -> Mapping[str, bytes]:
    async with connected(effective) as discovery:
        return await discovery.get_prefix(config_prefix(effective.config.runtime.namespace))


def _with_live(effective: EffectiveConfig) -> EffectiveConfig:
    items = asyncio.run(_read_live(effective))
    return effective.with_settings(
        live_settings(effective.config.runtime.namespace, items, on_bad=_warn)
    )


def _warn(text: str) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"warning: {text}", markup=False)
