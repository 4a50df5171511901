"""Live thresholds: what etcd says is in force at once, and what is wrong changes nothing."""

from collections.abc import AsyncIterator

import pytest

from tandem.decode.config import DisaggConfig, Policy
from tandem.decode.thresholds import LiveThresholds
from tandem.runtime.store.discovery import MemoryDiscovery, config_key

PREFIX = "/tandem/t/config/"


@pytest.fixture
async def discovery() -> AsyncIterator[MemoryDiscovery]:
    discovery = MemoryDiscovery()
    await discovery.start()
    yield discovery
    await discovery.close()


async def follow(discovery: MemoryDiscovery) -> LiveThresholds:
    view = discovery.watch(PREFIX)
    await view.ready()
    return LiveThresholds(DisaggConfig(max_prefill_queue_size=7), view, "t", "org/a model")


async def test_a_value_that_was_set_before_the_start_is_in_force(
    discovery: MemoryDiscovery,
) -> None:
    await discovery.put_config(PREFIX + "disagg.policy", b'"always_remote"')
    live = await follow(discovery)
    assert live.current.policy == Policy.ALWAYS_REMOTE
    assert live.current.max_prefill_queue_size == 7


async def test_a_changed_value_is_in_force_and_a_deleted_one_falls_back(
    discovery: MemoryDiscovery,
) -> None:
    live = await follow(discovery)
    await discovery.put_config(PREFIX + "disagg.max_local_prefill_length", b"512")
    assert live.current.max_local_prefill_length == 512
    await discovery.delete(PREFIX + "disagg.max_local_prefill_length")
    assert live.current.max_local_prefill_length == 1000


@pytest.mark.parametrize("value", [b"-1", b'"many"', b"{", b"null", b"1.5"])
async def test_a_bad_value_changes_nothing(discovery: MemoryDiscovery, value: bytes) -> None:
    live = await follow(discovery)
    await discovery.put_config(PREFIX + "disagg.max_local_prefill_length", b"512")
    await discovery.put_config(PREFIX + "disagg.max_local_prefill_length", value)
    await discovery.put_config(PREFIX + "disagg.no_such_key", b"1")
    assert live.current.max_local_prefill_length == 512


async def test_a_models_own_value_goes_before_that_of_its_namespace(
    discovery: MemoryDiscovery,
) -> None:
    live = await follow(discovery)
    name = "disagg.max_local_prefill_length"
    await discovery.put_config(config_key("t", name, "org/a model"), b"77")
    await discovery.put_config(config_key("t", name, "org"), b"5")
    await discovery.put_config(config_key("t", name), b"512")
    assert live.current.max_local_prefill_length == 77
    await discovery.delete(config_key("t", name, "org/a model"))
    assert live.current.max_local_prefill_length == 512
