"""Doctor's checks of the parts: ports, torch, NATS, etcd, and a transfer over NIXL."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from tandem.config.model import EffectiveConfig, TandemConfig
from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.errors import ConfigError, ServiceError, TandemError
from tandem.runtime.local.devices import list_gpus
from tandem.runtime.local.findings import Finding, fail, ok, warn
from tandem.runtime.local.local_servers import LocalEtcd, LocalNats, LocalServer
from tandem.runtime.local.ports import is_port_free
from tandem.runtime.printable import masked
from tandem.runtime.process.lifecycle import started
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.transfer.network_devices import VARIABLE, devices_of, is_loopback

PROBE_TIMEOUT_S = 60.0
SLOW_TRANSFER_GB_PER_S = 1.0


def check_ports(config: TandemConfig) -> Iterator[Finding]:
    """Yield a finding about the frontend's address: free, taken, or not of this machine."""
    frontend = config.frontend
    subject = f"port {frontend.port}"
    try:
        is_free = frontend.port == 0 or is_port_free(frontend.host, frontend.port)
    except ConfigError as error:
        yield fail(subject, error.message, "choose another with --frontend.host or --port")
        return
    if is_free:
        yield ok(subject, f"free on {frontend.host}")
    else:
        yield warn(subject, f"taken on {frontend.host}", "tandem serve --port 0 takes a free one")


def check_torch() -> Iterator[Finding]:
    """Check that torch loads and sees the GPUs that the driver shows."""
    script = (
        "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda,"
        " torch.cuda.device_count(), torch.get_num_threads()]))"
    )
    try:
        version, cuda, num_gpus, num_threads = json.loads(_run_probe(["-c", script]))
    except ServiceError as error:
        yield fail("torch", str(error), "reinstall torch")
        return
    built = f"built for CUDA {cuda}" if cuda else "built for the CPU"
    detail = f"{version}, {built}, {num_threads} threads"
    if list_gpus() and num_gpus == 0:
        yield fail(
            "torch",
            f"{detail}; it sees no GPU",
            "install the build of torch for this driver's CUDA",
        )
    else:
        yield ok("torch", detail)


def check_cpu_kernels() -> Iterator[Finding]:
    """Check that the CPU kernels can be compiled, on a machine without a GPU."""
    if list_gpus():
        return
    script = "from tandem.kernels.cpu.build import load_library; print(load_library()._name)"
    try:
        yield ok("cpu kernels", _run_probe(["-c", script]).strip())
    except ServiceError as error:
        yield warn(
            "cpu kernels", str(error), "install gcc: without it PyTorch's slower kernels are used"
        )


def check_servers(effective: EffectiveConfig) -> Iterator[Finding]:
    """Start NATS and etcd as `tandem serve` does, and connect to the configured ones."""
    for server in (LocalNats(), LocalEtcd()):
        yield asyncio.run(_start_and_stop(server))
    for name, key in (("nats", "runtime.nats_url"), ("etcd", "runtime.etcd_endpoints")):
        if effective.origin(key) != "default":
            yield asyncio.run(_reach(name, effective))


def check_nixl(host: str) -> Iterator[Finding]:
    """Write blocks from one NIXL agent to another over host memory, as a worker on `host` would."""
    try:
        answer = json.loads(_run_probe(["-m", "tandem.launch.doctor.nixl_probe", host]))
    except ServiceError as error:
        yield fail(
            "nixl transfer",
            str(error),
            "without NIXL, prompts are prefilled on their decode worker only",
        )
        return
    detail = (
        f"{answer['mebibytes']} MiB between two agents: {answer['gb_per_s']:.1f} GB/s, "
        f"complete on both sides after {answer['both_know_us']:.0f} us"
    )
    if not answer["is_intact"]:
        yield fail(
            "nixl transfer",
            f"{detail}, but the bytes that arrived are wrong",
            "report this as a bug",
        )
    elif answer["gb_per_s"] < SLOW_TRANSFER_GB_PER_S:
        yield warn(
            "nixl transfer",
            detail,
            "slow for a memory copy: see `memory of other processes` and `/dev/shm` above",
        )
    else:
        yield ok("nixl transfer", detail)
    yield _reachable(host, answer["listens"])


def _reachable(host: str, listens: list[str]) -> Finding:
    """Return the finding on the networks that reach UCX's ports, whose clients are trusted."""
    detail = f"listens on {', '.join(listens) or 'no TCP port'}, with runtime.host {host}"
    named = f"{VARIABLE}={os.environ[VARIABLE]}" if VARIABLE in os.environ else ""
    if is_loopback(host) and not all(is_loopback(address) for address in listens):
        return fail(
            "ucx ports",
            f"{detail}: the network reaches the workers' memory",
            f"unset {named}" if named else f"set {VARIABLE}=lo",
        )
    if not devices_of(host) and not named:
        return warn(
            "ucx ports",
            f"{detail}: every network of this machine reaches the workers' memory",
            f"set runtime.host to one address, or {VARIABLE} to the device of a private network",
        )
    return ok("ucx ports", detail)


async def _start_and_stop(server: LocalServer) -> Finding:
    subject = f"{server.name} starts"
    started = time.perf_counter()
    try:
        async with server:
            took_ms = 1e3 * (time.perf_counter() - started)
            return ok(subject, f"answered at {masked(server.url)} after {took_ms:.0f} ms")
    except (ServiceError, OSError) as error:
        return fail(
            subject, str(error), "give the address of a running one: --nats-url or --etcd-endpoints"
        )


async def _reach(name: str, effective: EffectiveConfig) -> Finding:
    runtime = effective.config.runtime.model_copy(update={"connect_attempts": 1})
    url = masked(runtime.nats_url if name == "nats" else runtime.etcd_endpoints)
    connection = NatsConnection(runtime) if name == "nats" else EtcdDiscovery(runtime)
    try:
        async with started(connection):
            doubt = "" if isinstance(connection, NatsConnection) else connection.doubt
    except TandemError as error:
        return fail(
            f"{name} at {url}", error.message, "check that it runs, and that the address is right"
        )
    if doubt:
        return warn(f"{name} at {url}", doubt, "install a newer etcd there")
    return ok(f"{name} at {url}", "reachable")


def _run_probe(arguments: list[str]) -> str:
    """Return the last line of a new Python process: a library that crashes ends only that one."""
    command = [sys.executable, "-P", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"no answer within {PROBE_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ServiceError(f"exit code {done.returncode}: {last}")
    return done.stdout.strip().splitlines()[-1]
