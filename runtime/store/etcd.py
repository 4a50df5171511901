"""Discovery in etcd: one task keeps the lease, one task per view follows a prefix."""

import asyncio
import contextlib
import functools
import logging
import random
import time
from collections.abc import Awaitable, Iterable
from contextlib import aclosing

from tandem.runtime.clock import wall_seconds
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError, ServiceError
from tandem.runtime.store.discovery import WatchView
from tandem.runtime.store.etcd_client import Entry, EtcdClient, Snapshot
from tandem.runtime.store.seals import Seals
from tandem.runtime.tasks import cancel, ends_within, keep_running
from tandem.runtime.tls import read_files

logger = logging.getLogger(__name__)

_MAX_BACKOFF_S = 1.0
_CHECK_INTERVAL_S = 3.0  # between checks that the own keys are there


class EtcdDiscovery:
    """Discovery over etcd. Views are kept over an outage; own keys that are gone are put again."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        store_key = f"/tandem/{config.namespace}/store"
        self._client = EtcdClient(config.etcd_endpoints, store_key, read_files(config))
        self._seals = Seals(config.cluster_token)
        self._own: dict[str, bytes] = {}  # as stored
        self._withdrawn: set[str] = set()  # deleted while etcd was away
        self._lease_id = 0
        self._followers: dict[WatchView, _Follower] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._suspect = asyncio.Event()  # something failed: check the lease now
        self._is_behind = False  # etcd may lack a change of own keys
        self.connected = False
        self.doubt = ""  # a warning about the server's version

    # ---- lifecycle ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect and take a lease. Raise ServiceError after `connect_attempts`."""
        await self._client.open()
        started_s = time.perf_counter()
        num_attempts = self._config.connect_attempts
        for attempt in range(1, num_attempts + 1):
            try:
                await self._establish()
                break
            except ServiceError as error:
                if attempt < num_attempts:
                    await asyncio.sleep(_backoff_s(attempt))
                    continue
                await self.close()
                took_s = time.perf_counter() - started_s
                raise ServiceError(
                    f"etcd not reachable at {self._config.etcd_endpoints} after {num_attempts} "
                    f"attempts ({took_s:.1f} s): {error.message}"
                ) from error
        with contextlib.suppress(ServiceError):  # it may be kept from those who have no role
            self.doubt = await self._client.doubt()
        if self.doubt:
            _warn_once(self.doubt)
        self._keeper = keep_running("the keeper of the etcd lease", self._keep)
        logger.info("etcd at %s, lease %x", self._config.etcd_endpoints, self._lease_id)

    async def close(self) -> None:
        """Revoke the lease and stop following; bounded to a few seconds without etcd."""
        for view in list(self._followers):
            await view.close()
        await cancel(self._keeper)
        self._keeper = None
        if self._lease_id:
            try:
                await self._client.revoke(self._lease_id)
            except ServiceError as error:
                logger.warning("lease %x was not revoked: %s", self._lease_id, error)
            self._lease_id = 0
        self.connected = False
        await self._client.close()

    # ---- own keys -----------------------------------------------------------------------------

    async def put(self, key: str, value: bytes) -> None:
        self._own[key] = value = self._seals.seal(key, value)
        self._withdrawn.discard(key)
        await self._or_later(self._client.put(key, value, self._lease_id), f"putting {key}")

    async def delete(self, key: str) -> None:
        self._own.pop(key, None)
        self._withdrawn.add(key)
        await self._or_later(self._put_withdrawals(), f"deleting {key}")

    async def _or_later(self, attempt: Awaitable[None], what: str) -> None:
        try:
            await attempt
        except ServiceError as error:
            logger.warning("%s waits for etcd: %s", what, error)
            self._is_behind = True
            self._suspect.set()

    async def _put_withdrawals(self) -> None:
        for key in list(self._withdrawn):
            await self._client.delete(key)
            self._withdrawn.discard(key)

    async def _establish(self) -> None:
        """Make sure of a live lease with every own key on it."""
        if not self._lease_id or await self._client.keep_alive(self._lease_id) <= 0:
            ttl_s = round(wall_seconds(self._config.lease_ttl_s))
            self._lease_id = await self._client.grant(ttl_s)
        self._is_behind = False
        await self._put_own(list(self._own))
        await self._put_withdrawals()
        self.connected = True

    async def _put_own(self, keys: Iterable[str]) -> None:
        for key in keys:
            if (value := self._own.get(key)) is not None:
                await self._client.put(key, value, self._lease_id)
                if key not in self._own:  # withdrawn meanwhile
                    await self._client.delete(key)

    async def _put_missing(self) -> None:
        """Put own keys again that are not on the lease: deleted, or put by another process."""
        own = set(self._own)  # before the look: a key that is put meanwhile is not missing
        missing = own - await self._client.keys_of(self._lease_id)
        if missing:
            logger.warning("etcd lost %d keys of this process; putting them again", len(missing))
            await self._put_own(missing)

    async def _keep(self) -> None:
        """Prolong the lease and look for lost keys; after a loss, retry until all is back."""
        attempt = 0
        interval_s = min(_CHECK_INTERVAL_S, self._config.lease_ttl_s / 3)
        while True:
            if attempt:
                await asyncio.sleep(_backoff_s(attempt))
            else:
                await ends_within(self._suspect.wait(), interval_s)
            self._suspect.clear()
            try:
                is_lost = attempt or self._is_behind
                if is_lost or await self._client.keep_alive(self._lease_id) <= 0:
                    await self._establish()
                    logger.info("etcd: registered again, lease %x", self._lease_id)
                else:
                    await self._put_missing()
                attempt = 0
            except ServiceError as error:
                if not attempt:
                    logger.warning("etcd is away; the last state is used: %s", error)
                self.connected = False
                attempt += 1
                await self._look_elsewhere()

    async def _look_elsewhere(self) -> None:
        """Follow etcd to the address that the services file has now."""
        try:
            await self._client.redirect(self._config.with_current_services().etcd_endpoints)
        except (ConfigError, ServiceError) as error:
            logger.warning("runtime.services_file: %s", error.message)

    # ---- shared keys --------------------------------------------------------------------------

    async def put_config(self, key: str, value: bytes) -> None:
        await self._client.put(key, value)

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        snapshot = await self._client.snapshot(prefix)
        found = {key: self._seals.opened(key, e.value) for key, e in snapshot.items.items()}
        return {key: value for key, value in found.items() if value is not None}

    def watch(self, prefix: str) -> WatchView:
        view = WatchView(prefix, self._unfollow)
        self._followers[view] = _Follower(
            self._client, view, self._seals, self._config.lease_ttl_s, self._suspect
        )
        return view

    def _unfollow(self, view: WatchView) -> None:
        follower = self._followers.pop(view, None)
        if follower is not None:
            follower.stop()


class _Follower:
    """Keeps one view up to date; deleted keys leave it, those that an empty store lost may stay."""

    def __init__(
        self,
        client: EtcdClient,
        view: WatchView,
        seals: Seals,
        grace_s: float,
        suspect: asyncio.Event,
    ) -> None:
        self._client = client
        self._view = view
        self._seals = seals
        self._grace_s = grace_s
        self._suspect = suspect
        self._store_id: str | None = None
        self._leased: dict[str, bool] = {}
        self._missing: set[str] = set()  # gone with the store; still in the view
        self._grace: asyncio.TimerHandle | None = None
        self._task = keep_running(f"the follower of {view.prefix}", self._follow)

    def stop(self) -> None:
        self._task.cancel()
        if self._grace is not None:
            self._grace.cancel()

    async def _follow(self) -> None:
        attempt = 0
        while True:
            try:
                snapshot = await self._client.snapshot(self._view.prefix)
                self._resync(snapshot)
                attempt = 0
                async with aclosing(self._client.watch(self._view.prefix, snapshot)) as watch:
                    async for changes in watch:
                        for key, entry in changes:
                            self._missing.discard(key)
                            self._apply(key, entry)
            except ServiceError as error:
                logger.debug("watch of %s: %s", self._view.prefix, error)
            self._suspect.set()
            attempt += 1
            await asyncio.sleep(_backoff_s(attempt))

    def _apply(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            self._leased.pop(key, None)
            self._view.apply(key, None)
        elif (value := self._seals.opened(key, entry.value)) is not None:
            self._leased[key] = entry.is_leased
            self._view.apply(key, value)

    def _resync(self, snapshot: Snapshot) -> None:
        """Bring the view up to date.

        Keys that a *new* store lacks were lost, not deleted: their owners have the time of a lease
        to put leased ones again; config keys stay as they were.
        """
        vanished = self._view.items.keys() - snapshot.items.keys()
        if self._store_id not in (None, snapshot.store_id):
            prefix = self._view.prefix
            logger.warning("etcd came back empty; keeping %d keys of %s", len(vanished), prefix)
            self._missing |= vanished
        self._store_id = snapshot.store_id
        self._missing &= vanished
        for key in vanished - self._missing:
            self._apply(key, None)
        for key, entry in snapshot.items.items():
            self._apply(key, entry)
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        if self._missing:
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(self._grace_s, self._end_grace)
        self._view.mark_ready()

    def _end_grace(self) -> None:
        for key in [key for key in self._missing if self._leased[key]]:
            self._missing.discard(key)
            self._apply(key, None)


@functools.cache
def _warn_once(doubt: str) -> None:
    """Log a warning about the server, the first time that this process connects to such a one."""
    logger.warning("%s", doubt)


def _backoff_s(attempt: int) -> float:
    return float(min(_MAX_BACKOFF_S, 0.1 * 2**attempt) * random.uniform(0.5, 1.0))
