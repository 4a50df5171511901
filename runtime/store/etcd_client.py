"""The part of etcd's API that Tandem uses; the only module that imports aetcd.

Only aetcd's generated stubs are used: its own client's watcher hangs when a stream ends without an
error, and its channel cannot fail over. The one gRPC channel here reconnects by itself.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import grpc
from aetcd import rpc
from aetcd.utils import prefix_range_end

from tandem.runtime.address import host_port, new_id
from tandem.runtime.errors import ConfigError, ServiceError
from tandem.runtime.printable import one_line
from tandem.runtime.store.etcd_versions import doubt_of
from tandem.runtime.tls import TlsFiles

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_MAX_DETAIL_BYTES = 300  # of an error
_CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # also the time one connect may take
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),  # etcd refuses pings more often than every 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
    # a prefix in one message, whatever strangers put there; gRPC's own limit is 4 MiB
    ("grpc.max_receive_message_length", 256 * 1024 * 1024),
]


class Entry(NamedTuple):
    """A key's value; an `is_leased` key goes when its owner goes."""

    value: bytes
    is_leased: bool


class Snapshot(NamedTuple):
    """The keys under a prefix at one revision; `store_id` is new when etcd came back empty."""

    store_id: str
    revision: int
    items: dict[str, Entry]


Changes = list[tuple[str, Entry | None]]  # key, its entry now; None: deleted


class EtcdClient:
    """A client whose methods raise ServiceError, naming the addresses, when etcd fails.

    `endpoints` is a comma-separated list of URLs, of which one must answer, or the URL of one unix
    socket. `store_key` is the key of the store's random name. `https` URLs are dialed with `tls`;
    the certificates of several must name the first one's host.
    """

    def __init__(self, endpoints: str, store_key: str, tls: TlsFiles | None = None) -> None:
        self._tls = tls or TlsFiles(None, None, None)
        self._set_endpoints(endpoints)
        self._store_key = store_key.encode()
        self._channel: Any = None

    def _set_endpoints(self, endpoints: str) -> None:
        self._endpoints = endpoints
        self._socket = _unix_socket(endpoints)
        urls = [] if self._socket else [_split(url) for url in endpoints.split(",")]
        self._targets = [(url.hostname or "", url.port or 2379) for url in urls]
        self._name = self._targets[0][0] if urls else ""  # in the certificate of each
        self._is_silent = False  # a call got no answer
        self._is_secure = any(url.scheme == "https" for url in urls)
        if self._is_secure and not all(url.scheme == "https" for url in urls):
            raise ConfigError(f"runtime.etcd_endpoints: {endpoints!r} mixes http and https")

    async def redirect(self, endpoints: str) -> None:
        """Dial other addresses from now on; calls under way at the old ones fail.

        Of the same ones another comes first where a call got no answer: gRPC stays with a server
        that is frozen. Raise ConfigError for text that is no list of URLs.
        """
        if endpoints != self._endpoints:
            self._set_endpoints(endpoints)
        elif self._is_silent and len(self._targets) > 1:
            self._targets = [*self._targets[1:], self._targets[0]]
        else:
            return
        self._is_silent = False
        await self.close()
        await self.open()

    async def open(self) -> None:
        """Create the channel, without a request to etcd."""
        if self._socket:
            target = f"unix:{self._socket}"
        elif len(self._targets) == 1:
            target = host_port(*self._targets[0])
        else:
            target = await _resolved(self._targets)
        if self._is_secure:
            options = [*_CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", self._name)]
            credentials = grpc.ssl_channel_credentials(*self._tls)
            self._channel = rpc.secure_channel(target, credentials, options=options)
        else:
            self._channel = rpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
        self._kv = rpc.KVStub(self._channel)
        self._leases = rpc.LeaseStub(self._channel)
        self._watches = rpc.WatchStub(self._channel)
        self._maintenance = rpc.MaintenanceStub(self._channel)

    async def close(self) -> None:
        """Close the channel; calls under way fail."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    async def doubt(self) -> str:
        """Return a warning about the version of the server that answers; empty for a good one."""
        with self._translated():
            status = await self._maintenance.Status(rpc.StatusRequest(), timeout=_TIMEOUT_S)
        return doubt_of(status.version, [host for host, _ in self._targets])

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> None:
        """Set a key; with a lease, until the lease ends."""
        request = rpc.PutRequest(key=key.encode(), value=value, lease=lease_id)
        with self._translated():
            await self._kv.Put(request, timeout=_TIMEOUT_S)

    async def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        with self._translated():
            request = rpc.DeleteRangeRequest(key=key.encode())
            await self._kv.DeleteRange(request, timeout=_TIMEOUT_S)

    async def grant(self, ttl_s: int) -> int:
        """Take a new lease and return its id."""
        with self._translated():
            grant = await self._leases.LeaseGrant(
                rpc.LeaseGrantRequest(TTL=ttl_s), timeout=_TIMEOUT_S
            )
            return int(grant.ID)

    async def keep_alive(self, lease_id: int) -> int:
        """Prolong a lease; return its seconds, 0 when etcd has lost it."""
        request = rpc.LeaseKeepAliveRequest(ID=lease_id)
        with self._translated():
            call = self._leases.LeaseKeepAlive([request], timeout=_TIMEOUT_S)
            async for reply in call:
                call.cancel()
                return int(reply.TTL)
        return 0

    async def keys_of(self, lease_id: int) -> set[str]:
        """Return the keys that hang on a lease; none when etcd has lost it."""
        with self._translated():
            request = rpc.LeaseTimeToLiveRequest(ID=lease_id, keys=True)
            reply = await self._leases.LeaseTimeToLive(request, timeout=_TIMEOUT_S)
            return {key.decode(errors="replace") for key in reply.keys}

    async def revoke(self, lease_id: int) -> None:
        """End a lease and remove its keys."""
        with self._translated():
            await self._leases.LeaseRevoke(rpc.LeaseRevokeRequest(ID=lease_id), timeout=_TIMEOUT_S)

    async def snapshot(self, prefix: str) -> Snapshot:
        """Read a prefix and the store's name in one transaction; name a new store."""
        start = prefix.encode()
        candidate = new_id()
        read = rpc.RequestOp(
            request_range=rpc.RangeRequest(key=start, range_end=prefix_range_end(start))
        )
        name = rpc.RequestOp(
            request_put=rpc.PutRequest(key=self._store_key, value=candidate.encode())
        )
        ask = rpc.RequestOp(request_range=rpc.RangeRequest(key=self._store_key))
        is_new = rpc.Compare(
            result=rpc.Compare.EQUAL,
            target=rpc.Compare.CREATE,
            key=self._store_key,
            create_revision=0,
        )
        request = rpc.TxnRequest(compare=[is_new], success=[name, read], failure=[ask, read])
        with self._translated():
            reply = await self._kv.Txn(request, timeout=_TIMEOUT_S)
        store_id = candidate
        if not reply.succeeded:
            store_id = reply.responses[0].response_range.kvs[0].value.decode(errors="replace")
        items: dict[str, Entry] = {}
        for kv in reply.responses[1].response_range.kvs:
            if (key := _key(kv)) is not None:
                items[key] = Entry(kv.value, kv.lease != 0)
        return Snapshot(store_id, reply.header.revision, items)

    async def watch(self, prefix: str, snapshot: Snapshot) -> AsyncGenerator[Changes, None]:
        """Yield the changes after the snapshot, until etcd ends the watch (restart, compaction).

        gRPC may move a young call to a restarted etcd without notice; an empty store would then
        wait for a revision that is far off. So the store's name is compared once the watch stands.
        """
        start = prefix.encode()
        create = rpc.WatchCreateRequest(
            key=start, range_end=prefix_range_end(start), start_revision=snapshot.revision + 1
        )
        with self._translated():
            call = self._watches.Watch()
            try:
                await call.write(rpc.WatchRequest(create_request=create))
                async for reply in call:
                    if reply.canceled:
                        return
                    if reply.created and await self._store_id() != snapshot.store_id:
                        return
                    yield [
                        (key, _entry(event))
                        for event in reply.events
                        if (key := _key(event.kv)) is not None
                    ]
            finally:
                call.cancel()

    async def _store_id(self) -> str | None:
        reply = await self._kv.Range(rpc.RangeRequest(key=self._store_key), timeout=_TIMEOUT_S)
        return reply.kvs[0].value.decode(errors="replace") if reply.kvs else None

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        if self._channel is None:
            raise ServiceError(f"the connection to etcd at {self._endpoints} is closed")
        channel = self._channel
        try:
            yield
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if self._channel is channel or (task is not None and task.cancelling()):
                raise
            # by gRPC, as its channel was closed
            raise ServiceError(f"etcd at {self._endpoints} is dialed anew") from error
        except rpc.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._is_silent = True
                reason = f"etcd at {self._endpoints} does not answer within {_TIMEOUT_S:g} s"
                raise ServiceError(reason) from error
            details = one_line(error.details() or error.code().name, _MAX_DETAIL_BYTES)
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise ServiceError(
                    f"etcd at {self._endpoints} cannot be reached: {details}"
                ) from error
            raise ServiceError(f"etcd at {self._endpoints} failed: {details}") from error
        except rpc.BaseError as error:
            raise ServiceError(f"etcd at {self._endpoints} failed: {error!r}") from error


def _key(kv: Any) -> str | None:
    """Return a key's text. None for a key that is not UTF-8, and so not one of Tandem's."""
    try:
        return str(kv.key.decode())
    except UnicodeDecodeError:
        logger.warning("ignoring the etcd key %r: it is not UTF-8", kv.key)
        return None


def _entry(event: Any) -> Entry | None:
    return None if event.type == rpc.Event.DELETE else Entry(event.kv.value, event.kv.lease != 0)


async def _resolved(targets: Sequence[tuple[str, int]]) -> str:
    """Return gRPC's name of several addresses, which must be of one family: IPv4, else IPv6."""
    loop = asyncio.get_running_loop()
    for name, family in (("ipv4", socket.AF_INET), ("ipv6", socket.AF_INET6)):
        try:
            found = [
                await loop.getaddrinfo(*target, family=family, type=socket.SOCK_STREAM)
                for target in targets
            ]
        except OSError as error:
            unknown = error
        else:
            return f"{name}:" + ",".join(host_port(*entries[0][4][:2]) for entries in found)
    hosts = ", ".join(host for host, _ in targets)
    raise ServiceError(f"etcd's hosts {hosts} are unknown: {unknown}") from unknown


def _unix_socket(endpoints: str) -> str:
    """Return the path of `unix:///path`; empty for any other URL."""
    parts = urlsplit(endpoints.strip())
    is_path = parts.scheme == "unix" and not parts.netloc and "," not in parts.path
    return parts.path if is_path else ""


def _split(url: str) -> SplitResult:
    parts = urlsplit(url.strip() if "//" in url else f"http://{url.strip()}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"runtime.etcd_endpoints: {url!r} is not http://host:port, https://host:port or "
            "unix:///path"
        )
    return parts
