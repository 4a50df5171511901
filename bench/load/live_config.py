"""Live settings for the length of a comparison: applied, confirmed by every worker, put back."""

import asyncio
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from tandem.config.live import parse_live
from tandem.config.model import load_config
from tandem.config.session import Session
from tandem.runtime.address import host_port, new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError, DeadlineError, TandemError
from tandem.runtime.local.ports import local_address
from tandem.runtime.membership.instance_report import ask_worker
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.store.discovery import Discovery, config_key, config_prefix, read_instances
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.runtime.wire.cluster_messages import Instance

logger = logging.getLogger(__name__)

APPLY_TIMEOUT_S = 10.0
STATUS_TIMEOUT_S = 2.0
STATUS_INTERVAL_S = 0.05


def parse_settings(text: str) -> dict[str, Any]:
    """Return `disagg.policy=threshold,disagg.max_local_prefill_length=64` as values by key.

    Raises ConfigError for a key that is not live, or a value that would be refused.
    """
    config = load_config()
    values: dict[str, Any] = {}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"{part!r}: expected KEY=VALUE, as in disagg.policy=threshold")
        values[key] = parse_live(config, key, value)
    return values


def cluster_config(
    etcd_endpoints: str | None,
    namespace: str | None,
    nats_url: str | None = None,
    file: Path | None = None,
) -> RuntimeConfig:
    """Return the named cluster, else that of the environment or the file, else this machine's."""
    session = Session([], file)
    session.set("runtime.etcd_endpoints", etcd_endpoints, "--etcd-endpoints")
    session.set("runtime.namespace", namespace, "--namespace")
    session.set("runtime.nats_url", nats_url, "--nats-url")
    return session.load_for_cluster().config.runtime


def frontend_url(file: Path) -> str:
    """Return the address of the frontend in a config file; empty where the file names none."""
    effective = load_config(file=file)
    if all(effective.origin(f"frontend.{key}") == "default" for key in ("host", "port")):
        return ""
    frontend = effective.config.frontend
    return f"{frontend.scheme}://{host_port(local_address(frontend.host), frontend.port)}"


class LiveConfig:
    """Access to the live settings of a cluster; leaving it restores every key of `keys`."""

    def __init__(
        self, config: RuntimeConfig, keys: Collection[str], discovery: Discovery | None = None
    ) -> None:
        self._config = config
        self._keys = tuple(keys)
        self._discovery = discovery or EtcdDiscovery(config)
        self._client = RequestClient(config, new_id())
        self._before: dict[str, bytes] = {}

    async def __aenter__(self) -> Self:
        await self._discovery.start()
        try:
            stored = await self._discovery.get_prefix(config_prefix(self._config.namespace))
            self._before = {
                key: stored[path] for key in self._keys if (path := self._path(key)) in stored
            }
            if not await self._workers():
                raise ConfigError(
                    f"no decode worker in namespace {self._config.namespace!r} at "
                    f"{self._config.etcd_endpoints}: its settings cannot be compared"
                )
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            for key in self._keys:
                try:
                    await self._put_back(key)
                except TandemError as error:
                    logger.warning("%s could not be put back: %s", key, error)
        finally:
            await self._close()

    async def apply(self, settings: Mapping[str, Any]) -> None:
        """Set the values; keys of the other side go back to what they were.

        Returns when every decode worker reports the values. Raises DeadlineError naming the worker
        that does not.
        """
        for key in self._keys:
            if key in settings:
                value = msgspec.json.encode(settings[key])
                await self._discovery.put_config(self._path(key), value)
            else:
                await self._put_back(key)
        lagging = ""
        try:
            async with asyncio.timeout(APPLY_TIMEOUT_S):
                # a status is asked for, never announced
                while lagging := await self._lagging(settings):
                    await asyncio.sleep(STATUS_INTERVAL_S)
        except TimeoutError as exc:
            raise DeadlineError(f"after {APPLY_TIMEOUT_S:g} s {lagging}") from exc

    async def _lagging(self, settings: Mapping[str, Any]) -> str:
        """Return the first value that a worker does not report yet; empty without one."""
        for instance in await self._workers():
            who = f"decode worker {instance.instance_id}"
            report = await ask_worker(self._client, instance, STATUS_TIMEOUT_S)
            if report.worker is None:
                return f"{who} gives {report.state}"
            details = report.worker.details
            for key, value in settings.items():
                if key not in details:
                    raise ConfigError(f"{who} reports no {key}")
                if details[key] != value:
                    return f"{who} has {key} = {details[key]}, not {value}"
        return ""

    async def _workers(self) -> list[Instance]:
        found = await read_instances(self._discovery, self._config.namespace, ["decode"])
        return list(found.values())

    async def _put_back(self, key: str) -> None:
        before = self._before.get(key)
        if before is None:
            await self._discovery.delete(self._path(key))
        else:
            await self._discovery.put_config(self._path(key), before)

    async def _close(self) -> None:
        await self._client.close()
        await self._discovery.close()

    def _path(self, key: str) -> str:
        return config_key(self._config.namespace, key)
