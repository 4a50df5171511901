import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from tandem.bench.load.live_config import LiveConfig, cluster_config, frontend_url, parse_settings
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ConfigError
from tandem.runtime.plane.server import RequestServer, Responder
from tandem.runtime.store.discovery import (
    MemoryDiscovery,
    MemoryStore,
    config_key,
    config_prefix,
    register_instance,
)
from tandem.runtime.wire.cluster_messages import Instance, LoadReport, WorkerStatus
from tandem.runtime.wire.messages import encode

CONFIG = RuntimeConfig()
KEY = "disagg.policy"
PATH = config_key(CONFIG.namespace, KEY)


@asynccontextmanager
async def decode_worker(store: MemoryStore, instance_id: str) -> AsyncIterator[list[str]]:
    """Registers a status endpoint that reports the live policy; yields what it was seen to be."""
    discovery = MemoryDiscovery(store)
    view = discovery.watch(config_prefix(CONFIG.namespace))
    seen: list[str] = []

    async def status(payload: bytes, context: RequestContext, responder: Responder) -> None:
        policy = msgspec.json.decode(view.items.get(PATH, b'"adaptive"'))
        seen.append(policy)
        load = LoadReport(instance_id, "e", "decode", 0, 0, 0, 0, 0, 0)
        responder.send(encode(WorkerStatus(instance, "serving", load, {KEY: policy})))

    server = RequestServer(CONFIG, instance_id)
    server.register("status", status)
    await server.start()
    instance = Instance(
        CONFIG.namespace, "decode", "generate", instance_id, server.address, epoch="e"
    )
    await register_instance(discovery, instance)
    try:
        yield seen
    finally:
        await view.close()
        await discovery.close()
        await server.stop()


async def test_settings_are_applied_confirmed_by_every_worker_and_removed_again() -> None:
    store = MemoryStore()
    async with decode_worker(store, "one") as seen_one, decode_worker(store, "two") as seen_two:
        async with LiveConfig(CONFIG, [KEY], MemoryDiscovery(store)) as live:
            await live.apply({KEY: "always_local"})
            assert store.items[PATH] == b'"always_local"'
            assert (seen_one[-1], seen_two[-1]) == ("always_local", "always_local")
            await live.apply({KEY: "threshold"})
            assert (seen_one[-1], seen_two[-1]) == ("threshold", "threshold")
        assert PATH not in store.items


async def test_a_value_that_was_set_before_is_put_back_also_after_a_failure() -> None:
    store = MemoryStore()
    store.set(PATH, b'"always_remote"')
    async with decode_worker(store, "one"):
        with pytest.raises(asyncio.CancelledError):
            async with LiveConfig(CONFIG, [KEY], MemoryDiscovery(store)) as live:
                await live.apply({KEY: "always_local"})
                raise asyncio.CancelledError
        assert store.items[PATH] == b'"always_remote"'


async def test_a_key_of_the_other_side_only_is_put_back_for_this_side() -> None:
    store = MemoryStore()
    async with (
        decode_worker(store, "one") as seen,
        LiveConfig(CONFIG, [KEY], MemoryDiscovery(store)) as live,
    ):
        await live.apply({KEY: "always_local"})
        await live.apply({})
        assert PATH not in store.items
        await live.apply({KEY: "threshold"})
        assert seen[-1] == "threshold"


async def test_a_cluster_without_decode_workers_cannot_be_compared() -> None:
    with pytest.raises(ConfigError, match="no decode worker"):
        async with LiveConfig(CONFIG, [KEY], MemoryDiscovery(MemoryStore())):
            pass


def test_settings_are_parsed_to_the_types_of_their_keys() -> None:
    text = "disagg.policy=threshold, disagg.max_local_prefill_length=64"
    assert parse_settings(text) == {
        "disagg.policy": "threshold",
        "disagg.max_local_prefill_length": 64,
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("disagg.policy", "KEY=VALUE"),
        ("disagg.polcy=threshold", "disagg.policy"),
        ("disagg.policy=sometimes", "sometimes"),
        ("engine.block_size=32", "start only"),
    ],
)
def test_a_setting_that_would_be_refused_is_refused_before_the_load(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_settings(text)


def test_the_cluster_named_on_the_command_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_RUNTIME__ETCD_ENDPOINTS", "http://10.0.0.1:2379")
    monkeypatch.setenv("TANDEM_RUNTIME__NAMESPACE", "blue")
    config = cluster_config("http://10.0.0.2:2379", None)
    assert (config.etcd_endpoints, config.namespace) == ("http://10.0.0.2:2379", "blue")
    green = cluster_config(None, "green")
    assert green.etcd_endpoints == "http://10.0.0.1:2379"


def test_a_config_file_leads_to_the_cluster_and_its_frontend(tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("runtime: {namespace: blue, etcd_endpoints: 'http://e:1'}\n")
    assert frontend_url(file) == ""
    file.write_text(file.read_text() + "frontend: {host: 0.0.0.0, port: 81}\n")
    assert frontend_url(file) == "http://127.0.0.1:81"
    config = cluster_config(None, None, "nats://n:1", file)
    assert (config.namespace, config.etcd_endpoints) == ("blue", "http://e:1")
    assert config.nats_url == "nats://n:1"
