"""`tandem config`: effective values with their origin, and the live values in etcd."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import msgspec
from rich.console import Console
from rich.table import Table

from tandem.config.live import (
    connected,
    live_settings,
    parse_live,
    plain,
    require_live,
)
from tandem.config.model import (
    EffectiveConfig,
    all_keys,
    find_field,
    is_secret,
    load_config,
)
from tandem.config.sources import Setting
from tandem.runtime.errors import ConfigError, ServiceError
from tandem.runtime.local.local_clusters import running_clusters
from tandem.runtime.printable import short
from tandem.runtime.process.reporter import wide_console
from tandem.runtime.store.discovery import (
    Discovery,
    config_key,
    config_prefix,
    decode_card,
    models_prefix,
    readable,
)

CALL_TIMEOUT_S = 5.0
ROLE_FILES = "*-[0-9]*.yaml"  # the config of every role, written when it is started


def show_config(
    effective: EffectiveConfig,
    *,
    live: bool | None,
    as_json: bool,
    model: str = "",
) -> None:
    """Print every value and its origin. `live` None: read the cluster where one is known.

    With a `model`, live values are those that its workers have.

    Values that the cluster of this machine was not started with are marked, wherever they are from.
    """
    if live is not False:
        effective = _mark_not_in_force(effective)
    if live is not False and (live or effective.origin("runtime.etcd_endpoints") != "default"):
        try:
            effective = _with_live(effective, model)
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


def _mark_not_in_force(effective: EffectiveConfig) -> EffectiveConfig:
    """Return the config with a mark at every value that no role was started with."""
    etcd_endpoints = effective.config.runtime.etcd_endpoints
    roles = [
        load_config(file=path)
        for cluster in running_clusters()
        if cluster.etcd_endpoints == etcd_endpoints
        for path in sorted(Path(cluster.run_dir).glob(ROLE_FILES))
    ]
    settings = dict(effective.settings)
    for key in all_keys() if roles else []:
        value, origin = effective.value(key), effective.origin(key)
        if is_secret(find_field(Setting(key, None, ""))):
            continue  # it is in no file
        if value not in [role.value(key) for role in roles]:
            started = json.dumps(plain(roles[0], key))
            origin = f"{origin}, not in force: the cluster was started with {started}"
            settings[key] = Setting(key, value, origin)
    return replace(effective, settings=settings)


def get_value(effective: EffectiveConfig, key: str, model: str = "") -> None:
    """Print a live key's value in the cluster, or for one of its models."""
    require_live(key)
    print(json.dumps(plain(_with_live(effective, model), key)))


def set_value(effective: EffectiveConfig, key: str, text: str, model: str = "") -> None:
    """Check a live value and write it: for every model, or for `model` alone.

    Raise ConfigError for a bad value and for a model without a worker, and changes nothing.
    """
    require_live(key)
    before = _with_live(effective, model)
    value = parse_live(before, key, text)

    async def write(discovery: Discovery) -> None:
        namespace = effective.config.runtime.namespace
        if model:
            await _require_served(discovery, namespace, model)
        name = config_key(namespace, key, model)
        await discovery.put_config(name, msgspec.json.encode(value))

    asyncio.run(_call(effective, write))
    print(f"{key} = {json.dumps(value)} (was {json.dumps(plain(before, key))}){_for(model)}")


def unset_value(effective: EffectiveConfig, key: str, model: str = "") -> None:
    """Remove a live value: workers return to the value they were started with.

    A model whose own value is removed returns to that of the cluster.
    """
    require_live(key)

    async def remove(discovery: Discovery) -> None:
        await discovery.delete(config_key(effective.config.runtime.namespace, key, model))

    asyncio.run(_call(effective, remove))
    print(f"{key} is no longer set in the cluster{_for(model)}")


def watch_values(effective: EffectiveConfig) -> None:
    """Print live values and their changes, one line each, until interrupted."""
    asyncio.run(_watch(effective, lambda line: print(line, flush=True)))


async def _watch(effective: EffectiveConfig, emit: Callable[[str], None]) -> None:
    prefix = config_prefix(effective.config.runtime.namespace)

    def changed(key: str, value: bytes | None) -> None:
        model, _, name = key.removeprefix(prefix).rpartition("/")
        name += _for(unquote(model))
        emit(f"{name} = {value.decode()}" if value is not None else f"{name} is unset")

    async with connected(effective) as discovery:
        view = discovery.watch(prefix)
        view.subscribe(changed)
        await asyncio.Event().wait()


async def _call(effective: EffectiveConfig, work: Callable[[Discovery], Awaitable[None]]) -> None:
    async with connected(effective) as discovery, asyncio.timeout(CALL_TIMEOUT_S):
        await work(discovery)


async def _read_live(effective: EffectiveConfig) -> Mapping[str, bytes]:
    async with connected(effective) as discovery:
        return await discovery.get_prefix(config_prefix(effective.config.runtime.namespace))


def _with_live(effective: EffectiveConfig, model: str = "") -> EffectiveConfig:
    items = asyncio.run(_read_live(effective))
    return effective.with_settings(
        live_settings(effective.config.runtime.namespace, items, on_bad=_warn, model=model)
    )


async def _require_served(discovery: Discovery, namespace: str, model: str) -> None:
    if await discovery.get_prefix(models_prefix(namespace, model)):
        return
    cards = (await discovery.get_prefix(models_prefix(namespace))).values()
    served = sorted({card.name for card in readable(cards, decode_card)})
    raise ConfigError(
        f"--model {short(model)}: no worker serves it; served: {', '.join(served) or 'none'}",
        param="model",
    )


def _for(model: str) -> str:
    return f" for {model}" if model else ""


def _warn(text: str) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"warning: {text}", markup=False)
