"""Keys, views and typed records: the same for the in-memory store and for etcd."""

from collections.abc import AsyncIterator, Callable

import pytest

from tandem.runtime.address import new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError, DeadlineError
from tandem.runtime.store.discovery import (
    Discovery,
    MemoryDiscovery,
    MemoryStore,
    config_key,
    config_prefix,
    model_key,
    register_instance,
    register_model,
    register_transfer,
    watch_instances,
    watch_models,
    watch_transfer,
)
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.runtime.wire.cluster_messages import Instance, ModelCard, RankMetadata, TransferMetadata
from tests.services import PATIENCE_S, EtcdServer

Join = Callable[[], Discovery]
NAMESPACE = "test"


@pytest.fixture(params=["memory", "etcd"])
async def join(request: pytest.FixtureRequest) -> AsyncIterator[Join]:
    """What gives one more process's access to the same store."""
    joined: list[Discovery] = []
    store = MemoryStore()

    def memory() -> Discovery:
        joined.append(MemoryDiscovery(store))
        return joined[-1]

    def etcd() -> Discovery:
        joined.append(EtcdDiscovery(config))
        return joined[-1]

    if request.param == "etcd":
        server: EtcdServer = request.getfixturevalue("etcd")
        config = RuntimeConfig(namespace=new_id(), etcd_endpoints=server.url)
    yield memory if request.param == "memory" else etcd
    for discovery in joined:
        await discovery.close()


def instance(instance_id: str, component: str = "decode") -> Instance:
    return Instance(NAMESPACE, component, "generate", instance_id, "127.0.0.1:1", "e1")


async def test_a_view_follows_puts_changes_and_deletes(join: Join) -> None:
    ours, theirs = join(), join()
    await ours.start()
    await theirs.start()
    prefix = f"/tandem/{new_id()}/"
    await ours.put(prefix + "before", b"1")
    view = theirs.watch(prefix)
    await view.ready()
    assert dict(view.items) == {prefix + "before": b"1"}
    events: list[tuple[str, bytes | None]] = []
    undo = view.subscribe(lambda key, value: events.append((key.removeprefix(prefix), value)))
    await ours.put(prefix + "x", b"1")
    await ours.put(prefix + "x", b"2")
    await ours.delete(prefix + "x")
    await view.wait_for(lambda items: len(events) == 4, PATIENCE_S)
    assert events == [("before", b"1"), ("x", b"1"), ("x", b"2"), ("x", None)]
    undo()
    await ours.put(prefix + "y", b"1")
    await view.wait_for(lambda items: prefix + "y" in items, PATIENCE_S)
    assert len(events) == 4


async def test_leaving_takes_all_own_keys_away_and_nothing_else(join: Join) -> None:
    ours, theirs = join(), join()
    await ours.start()
    await theirs.start()
    prefix = f"/tandem/{new_id()}/"
    await ours.put(prefix + "ours", b"")
    await ours.put_config(prefix + "config", b"")
    await theirs.put(prefix + "theirs", b"")
    view = theirs.watch(prefix)
    await view.wait_for(lambda items: len(items) == 3, PATIENCE_S)
    await ours.close()
    await view.wait_for(
        lambda items: items.keys() == {prefix + "theirs", prefix + "config"}, PATIENCE_S
    )
    assert await theirs.get_prefix(prefix) == {prefix + "theirs": b"", prefix + "config": b""}


async def test_instances_are_seen_as_instances(join: Join) -> None:
    discovery = join()
    await discovery.start()
    view = watch_instances(discovery, NAMESPACE, "decode")
    seen: list[tuple[str, bool]] = []
    view.subscribe(lambda id, value: seen.append((id, value is not None)))
    key = await register_instance(discovery, instance("a"))
    assert key == "/tandem/test/instances/decode/generate/a"
    await register_instance(discovery, instance("p", "prefill"))
    await view.wait_for(lambda items: "a" in items, PATIENCE_S)
    assert view.items == {"a": instance("a")}
    await discovery.delete(key)
    await view.wait_for(lambda items: not items, PATIENCE_S)
    assert seen == [("a", True), ("a", False)]
    await view.close()


@pytest.mark.parametrize("record", [b"{", b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}"])
async def test_a_malformed_record_is_skipped_and_the_view_goes_on(
    join: Join, record: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    discovery = join()
    await discovery.start()
    view = watch_instances(discovery, NAMESPACE, "decode")
    await discovery.put("/tandem/test/instances/decode/generate/bad", record)
    await register_instance(discovery, instance("good"))
    await view.wait_for(lambda items: "good" in items, PATIENCE_S)
    assert view.items.keys() == {"good"}
    assert "ignoring /tandem/test/instances/decode/generate/bad" in caplog.text


async def test_model_cards_and_transfer_metadata_are_typed_too(join: Join) -> None:
    discovery = join()
    await discovery.start()
    card = ModelCard("org/model", 4096, 16, 100, "digest", "a", 0)
    metadata = TransferMetadata(
        "a", "e", "hash", "layout", "nixl", "DRAM", 2, 3, 1, [RankMetadata(b"\0\xff", 0, 1)]
    )
    assert await register_model(discovery, NAMESPACE, card) == model_key(
        NAMESPACE, "org/model", "a"
    )
    await register_transfer(discovery, NAMESPACE, metadata)
    models, transfers = watch_models(discovery, NAMESPACE), watch_transfer(discovery, NAMESPACE)
    await models.wait_for(lambda items: items == {"org%2Fmodel/a": card}, PATIENCE_S)
    await transfers.wait_for(lambda items: items == {"a": metadata}, PATIENCE_S)


async def test_waiting_for_what_does_not_come_ends(join: Join) -> None:
    discovery = join()
    await discovery.start()
    with pytest.raises(DeadlineError, match="/nothing/"):
        await discovery.watch("/nothing/").wait_for(lambda items: bool(items), 0.05)


async def test_a_failing_subscriber_does_not_stop_the_others(join: Join) -> None:
    discovery = join()
    await discovery.start()
    prefix = f"/tandem/{new_id()}/"
    view = discovery.watch(prefix)
    heard: list[str] = []
    view.subscribe(lambda key, value: [][0])
    view.subscribe(lambda key, value: heard.append(key))
    await discovery.put(prefix + "x", b"")
    await view.wait_for(lambda items: bool(heard), PATIENCE_S)


def test_config_keys_are_section_and_key() -> None:
    key = config_key("ns", "disagg.max_local_prefill_length")
    assert key == config_prefix("ns") + "disagg.max_local_prefill_length"
    for name in ("disagg", ".x", "disagg.", "a/b.c"):
        with pytest.raises(ConfigError):
            config_key("ns", name)
