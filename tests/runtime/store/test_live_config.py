"""The live level of log lines: a bad value changes nothing, a model's own goes first."""

import logging
from collections.abc import AsyncIterator

import pytest

from tandem.config.live import require_live
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError
from tandem.runtime.membership.node import LiveRuntime, Node, set_log_level
from tandem.runtime.process.lifecycle import started
from tandem.runtime.store.discovery import MemoryDiscovery, config_key, config_prefix
from tandem.runtime.store.live_config import LiveSection
from tests.services import eventually

KEY = "runtime.log_level"


@pytest.fixture
async def discovery(own_logging: None) -> AsyncIterator[MemoryDiscovery]:
    async with started(MemoryDiscovery()) as discovery:
        yield discovery


async def test_a_level_is_in_force_until_it_is_unset(
    discovery: MemoryDiscovery, caplog: pytest.LogCaptureFixture
) -> None:
    view = discovery.watch(config_prefix("t"))
    await view.ready()
    base = LiveRuntime(log_level="warning")
    LiveSection("runtime", base, view, "t", "org/a model", set_log_level)
    level = logging.getLogger().getEffectiveLevel
    await discovery.put_config(config_key("t", "runtime.log_format"), b'"json"')  # not live
    assert "log_format is refused" in caplog.text and "log_format is now" not in caplog.text
    await discovery.put_config(config_key("t", KEY), b'"debug"')
    assert level() == logging.DEBUG
    for bad in (b'"loud"', b"{", b"10", b"null", b"[" * 100_000, b"[" * 99 + b"]" * 99, b"\xff"):
        await discovery.put_config(config_key("t", KEY), bad)
        assert level() == logging.DEBUG
    await discovery.put_config(config_key("t", KEY, "org/a model"), b'"error"')
    await discovery.put_config(config_key("t", KEY, "other"), b'"info"')
    assert level() == logging.ERROR
    await discovery.delete(config_key("t", KEY, "org/a model"))
    assert level() == logging.DEBUG
    await discovery.delete(config_key("t", KEY))
    assert level() == logging.WARNING


async def test_every_connected_process_follows_what_the_command_may_set(
    runtime_config: RuntimeConfig, discovery: MemoryDiscovery
) -> None:
    require_live(KEY)
    with pytest.raises(ConfigError, match="read at the start only"):
        require_live("runtime.log_format")
    async with Node(runtime_config, component="worker", serves=False) as node:
        key = config_key(runtime_config.namespace, KEY)
        await node.discovery.put_config(key, b'"error"')
        await eventually(lambda: logging.getLogger().level == logging.ERROR)
