"""etcd killed, frozen, restarted and emptied under a running process."""

from collections.abc import AsyncIterator, Iterator, Mapping

import pytest
from aetcd import rpc

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError, ServiceError
from tandem.runtime.process.lifecycle import started
from tandem.runtime.store.etcd import EtcdDiscovery
from tests.services import PATIENCE_S, EtcdServer, eventually, free_port


@pytest.fixture(scope="module")
def lasting() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.fixture
async def server(lasting: EtcdServer) -> AsyncIterator[EtcdServer]:
    """The same server for all tests, without any key. A test that stops it starts it again."""
    async with started(EtcdDiscovery(RuntimeConfig(etcd_endpoints=lasting.url))) as discovery:
        everything = rpc.DeleteRangeRequest(key=b"\0", range_end=b"\0")
        await discovery._client._kv.DeleteRange(everything)
    yield lasting


@pytest.fixture
async def ours(server: EtcdServer) -> AsyncIterator[EtcdDiscovery]:
    config = RuntimeConfig(etcd_endpoints=server.url, lease_ttl_s=2)
    async with started(EtcdDiscovery(config)) as discovery:
        yield discovery


theirs = ours


async def test_no_etcd_is_an_error_that_names_the_address_and_the_attempts() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    discovery = EtcdDiscovery(RuntimeConfig(etcd_endpoints=url, connect_attempts=2))
    with pytest.raises(ServiceError, match=rf"etcd not reachable at {url} after 2 attempts \("):
        await discovery.start()


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="etcd_endpoints"):
        EtcdDiscovery(RuntimeConfig(etcd_endpoints="ftp://127.0.0.1:1"))


SOONER_THAN_GRPC_S = 20.0  # which leaves a silent server after a minute


@pytest.mark.slow
async def test_of_several_endpoints_one_that_is_frozen_is_left(server: EtcdServer) -> None:
    with EtcdServer() as other:
        several = RuntimeConfig(etcd_endpoints=f"{server.url},{other.url}", lease_ttl_s=2)
        alone = RuntimeConfig(etcd_endpoints=other.url)
        async with started(EtcdDiscovery(several)) as ours, started(EtcdDiscovery(alone)) as theirs:
            view = theirs.watch("/t/")
            await ours.put("/t/before", b"1")
            server.freeze()
            try:
                # puts that wait while the other server is dialed are not cancelled
                for number in range(3):
                    await ours.put(f"/t/{number}", b"1")
                await view.wait_for(lambda items: len(items) == 4, SOONER_THAN_GRPC_S)
            finally:
                server.thaw()


async def test_while_etcd_is_away_views_stay_and_writes_wait(
    server: EtcdServer, ours: EtcdDiscovery, theirs: EtcdDiscovery
) -> None:
    await ours.put("/t/kept", b"1")
    await ours.put("/t/withdrawn", b"1")
    view = theirs.watch("/t/")
    await view.wait_for(lambda items: len(items) == 2, PATIENCE_S)
    server.kill()
    await eventually(lambda: not theirs.connected)
    assert view.items.keys() == {"/t/kept", "/t/withdrawn"}
    await ours.put("/t/new", b"1")
    await ours.delete("/t/withdrawn")
    with pytest.raises(ServiceError, match=f"etcd at {server.url} (cannot be reached|does not)"):
        await theirs.put_config("/t/config", b"1")
    server.restart()
    await view.wait_for(lambda items: items.keys() == {"/t/kept", "/t/new"}, PATIENCE_S)
    await eventually(lambda: ours.connected and theirs.connected)


async def test_keys_that_are_not_utf_8_are_ignored(
    ours: EtcdDiscovery, theirs: EtcdDiscovery, caplog: pytest.LogCaptureFixture
) -> None:
    await ours.put("/t/x", b"1")
    view = theirs.watch("/t/")
    await view.ready()
    await ours._client._kv.Put(rpc.PutRequest(key=b"/t/\xff\xfe", value=b"1"))
    await ours._client._kv.Put(
        rpc.PutRequest(key=b"/tandem/tandem/store", value=b"\xff")
    )  # the name of the store
    await ours.put("/t/y", b"1")
    await view.wait_for(lambda items: items.keys() == {"/t/x", "/t/y"}, PATIENCE_S)
    late = theirs.watch("/t/")
    await late.wait_for(lambda items: items.keys() == {"/t/x", "/t/y"}, PATIENCE_S)
    assert "ignoring the etcd key b'/t/\\xff\\xfe'" in caplog.text


async def test_large_values_of_strangers_hide_no_honest_key(ours: EtcdDiscovery) -> None:
    await ours.put("/t/honest", b"1")
    for number in range(8):
        await ours.put_config(f"/t/stranger{number}", bytes(1_000_000))
    assert len(await ours.get_prefix("/t/")) == 9
    view = ours.watch("/t/")
    await view.wait_for(lambda items: "/t/honest" in items, PATIENCE_S)


async def test_own_keys_that_were_deleted_or_taken_over_are_put_again(
    ours: EtcdDiscovery, theirs: EtcdDiscovery
) -> None:
    own = {"/t/x": b"1", "/t/y": b"2"}
    for key, value in own.items():
        await ours.put(key, value)
    await ours.put("/t/withdrawn", b"3")
    await ours.delete("/t/withdrawn")
    view = theirs.watch("/t/")
    await view.wait_for(lambda items: items == own, PATIENCE_S)
    deleted: set[str] = set()  # the first may be back before the second is deleted
    view.subscribe(lambda key, value: deleted.add(key) if value is None else None)
    for key in own:
        await theirs._client.delete(key)
    await eventually(lambda: deleted == own.keys())
    await view.wait_for(lambda items: items == own, PATIENCE_S)
    await theirs.put_config("/t/x", b"a stranger's")
    await view.wait_for(lambda items: items["/t/x"] == b"a stranger's", PATIENCE_S)
    await view.wait_for(lambda items: items == own, PATIENCE_S)


async def test_everyone_registers_again_in_an_empty_etcd(
    server: EtcdServer, ours: EtcdDiscovery, theirs: EtcdDiscovery
) -> None:
    config = RuntimeConfig(etcd_endpoints=server.url, lease_ttl_s=60)
    async with started(EtcdDiscovery(config)) as dead:
        await dead.put("/t/dead", b"1")
        await ours.put("/t/ours", b"1")
        await ours.put_config("/t/config", b"1")
        view = theirs.watch("/t/")
        await view.wait_for(lambda items: len(items) == 3, PATIENCE_S)
        deleted: list[str] = []
        view.subscribe(lambda key, value: deleted.append(key) if value is None else None)
        dead._own.clear()  # it will not come back with its key
        server.restart(empty=True)
        await view.wait_for(lambda items: "/t/dead" not in items, PATIENCE_S)
        assert deleted == ["/t/dead"]
        assert view.items.keys() == {"/t/ours", "/t/config"}
        await eventually(lambda: ours.connected)
        assert await ours.get_prefix("/t/") == {"/t/ours": b"1"}


async def test_an_expired_lease_is_replaced(
    server: EtcdServer, ours: EtcdDiscovery, theirs: EtcdDiscovery
) -> None:
    await ours.put("/t/x", b"1")
    view = theirs.watch("/t/")
    await view.wait_for(lambda items: len(items) == 1, PATIENCE_S)
    changes: list[bytes | None] = []
    view.subscribe(lambda key, value: changes.append(value))
    revoke = EtcdDiscovery(RuntimeConfig(etcd_endpoints=server.url))
    await revoke.start()
    revoke._lease_id, mine = ours._lease_id, revoke._lease_id
    await revoke.close()
    assert mine
    await view.wait_for(lambda items: changes == [b"1", None, b"1"], PATIENCE_S)


async def test_a_frozen_etcd_is_noticed_and_survived(
    server: EtcdServer, ours: EtcdDiscovery, theirs: EtcdDiscovery
) -> None:
    await ours.put("/t/x", b"1")
    view = theirs.watch("/t/")
    await view.wait_for(lambda items: len(items) == 1, PATIENCE_S)
    server.freeze()
    with pytest.raises(ServiceError, match=f"etcd at {server.url} (cannot be reached|does not)"):
        await theirs.get_prefix("/t/")
    await eventually(lambda: not ours.connected)
    assert view.items == {"/t/x": b"1"}
    server.thaw()
    await eventually(lambda: ours.connected and view.items == {"/t/x": b"1"})
    await ours.put("/t/y", b"1")
    await view.wait_for(lambda items: "/t/y" in items, PATIENCE_S)


def records(items: Mapping[str, bytes]) -> dict[str, bytes]:
    """All keys but the name of the store."""
    return {key: value for key, value in items.items() if not key.endswith("/store")}


async def test_values_of_strangers_are_ignored_where_there_is_a_cluster_token(
    server: EtcdServer, theirs: EtcdDiscovery, caplog: pytest.LogCaptureFixture
) -> None:
    config = RuntimeConfig.model_validate(
        {"etcd_endpoints": server.url, "lease_ttl_s": 2, "cluster_token": "secret"}
    )
    prefix, setting = "/tandem/tandem/", "/tandem/tandem/config/disagg.policy"
    honest = {
        f"{prefix}{kind}/decode/generate/honest": b'{"address": "honest"}'
        for kind in ("instances", "models", "transfer")
    }
    async with started(EtcdDiscovery(config)) as first, started(EtcdDiscovery(config)) as second:
        for key, value in honest.items():
            await first.put(key, value)
        stored = await first._client.snapshot(prefix)
        view = second.watch(prefix)
        await view.wait_for(lambda items: records(items) == honest, PATIENCE_S)
        assert records(await theirs.get_prefix(prefix)) == {}  # it has no token
        for key in honest:
            planted = key.replace("honest", "stranger")
            for value in (b'{"address": "stranger"}', stored.items[key].value):
                await theirs.put_config(planted, value)
                await theirs.put_config(key, b'{"address": "stranger"}\n' + 64 * b"0")
        await theirs.put_config(setting, b'"never"')  # the last of these changes
        await view.wait_for(lambda items: setting in items, PATIENCE_S)
        assert records(view.items) == honest | {setting: b'"never"'}
        late = second.watch(prefix)
        await late.wait_for(
            lambda items: records(items) == honest | {setting: b'"never"'}, PATIENCE_S
        )
        assert "was not written with this process's cluster token" in caplog.text
