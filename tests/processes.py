"""Child processes: their environment, and the output of those that were started with pipes."""

import asyncio
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.local.child_process import ChildProcess
from tandem.runtime.store.discovery import watch_instances
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.runtime.wire.cluster_messages import Instance
from tests.services import PATIENCE_S


def cluster_variables(config: RuntimeConfig) -> dict[str, str]:
    """Return the environment by which a process of an author finds a cluster."""
    return {
        "TANDEM_RUNTIME__NAMESPACE": config.namespace,
        "TANDEM_RUNTIME__DRAIN_TIMEOUT_S": str(config.drain_timeout_s),
        "NATS_SERVER": config.nats_url,
        "ETCD_ENDPOINTS": config.etcd_endpoints,
    }


async def output_of(child: ChildProcess) -> tuple[bytes, bytes]:
    """Return what a child still writes to its two pipes, once it has ended."""

    async def rest(reader: asyncio.StreamReader | None) -> bytes:
        return b"" if reader is None else await reader.read()

    out, err = await asyncio.gather(rest(child.stdout), rest(child.stderr))
    await child.wait()
    return out, err


@asynccontextmanager
async def joined(
    child: ChildProcess, config: RuntimeConfig, component: str
) -> AsyncIterator[Instance]:
    """The only instance of a component, a child that leaves at SIGTERM without an error."""
    discovery = EtcdDiscovery(config)
    await discovery.start()
    try:
        view = watch_instances(discovery, config.namespace, component)
        await view.wait_for(lambda items: len(items) == 1, PATIENCE_S)
        [instance] = view.items.values()
        yield instance
        child.signal(signal.SIGTERM)
        await view.wait_for(lambda items: not items, PATIENCE_S)
        await view.close()
        _, log = await output_of(child)
        assert child.exit_code == 0, log.decode()
        assert b"Traceback" not in log, log.decode()
    finally:
        if child.exit_code is None:
            child.kill()
            await child.wait()
        await discovery.close()


def line_until(pattern: str, process: subprocess.Popen[str], lines: list[str]) -> re.Match[str]:
    """Add lines of a process to `lines` until one matches. Fail at the process's end."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"no line matched {pattern!r} in:\n{''.join(lines)}")
