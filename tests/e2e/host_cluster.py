"""Workers on hosts of their own, services and a frontend here, with TLS and firewalls."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tandem.config.flags import Flag
from tandem.config.model import load_config
from tandem.launch.cluster.status import ClusterReport, read_cluster
from tandem.launch.supervise.network_servers import NetworkEtcd, NetworkNats
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import TandemError
from tandem.runtime.local.child_process import ChildProcess
from tests.certificates import Authority
from tests.e2e.cluster import write_sensitive_model
from tests.hosts import Host, Hosts, end, host_environment
from tests.services import PATIENCE_S, eventually, free_port

TOKEN = "a token of the test"
PORTS, TRANSFER_PORTS = "31000-31009", "31100-31199"
# what the firewall of a worker's host lets in is what docs/deployment.md says of its ports
FIREWALL = (
    f'iifname != "lo" tcp flags & (syn | ack) == syn tcp dport != {{ {PORTS}, {TRANSFER_PORTS} }}'
)


class HostCluster:
    """NATS, etcd and a frontend on this machine, one worker on each host."""

    def __init__(self, hosts: Hosts, folder: Path, *flags: str) -> None:
        self.hosts, self._folder, self._flags = hosts, folder, flags
        self._model = write_sensitive_model(folder / "model")
        addresses = [hosts.address, *(host.address for host in hosts.all)]
        files = Authority(folder / "tls").issue(*addresses)
        self._tls = [f"--runtime.{key}={path}" for key, path in files.items()]
        self._runtime = RuntimeConfig.model_validate({"host": hosts.address, **files})
        self._environment = host_environment() | {
            "OMP_NUM_THREADS": "1",
            "TANDEM_RUNTIME__CLUSTER_TOKEN": TOKEN,
        }
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.url = f"http://{hosts.address}:{free_port()}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["HostCluster"]:
        async with (
            NetworkNats(self._folder, self._runtime) as nats,
            NetworkEtcd(self._folder, self._runtime) as etcd,
        ):
            self._join = [
                *("--runtime.nats_url", nats.url, "--runtime.etcd_endpoints", etcd.url),
                *("--runtime.lease_ttl_s=3", *self._tls),
            ]
            host, _, port = self.url.removeprefix("http://").rpartition(":")
            frontend = await ChildProcess.start(
                [*_command("frontend"), "--host", host, "--port", port, *self._join],
                self._folder / "frontend.log",
                env=self._environment,
            )
            try:
                for each in self.hosts.all:
                    each.drop(FIREWALL)
                    self.start(each)
                await self.until_serving(3)
                yield self
            finally:
                for process in self.workers.values():
                    end(process)
                await frontend.stop(15)

    def start(self, host: Host) -> None:
        """Start a host's worker, which is its first process."""
        words = [
            *(*_command("worker"), str(self._model), "--gpu", "cpu", "--runtime.interface=route"),
            *(f"--runtime.port_range={PORTS}", f"--transfer.port_range={TRANSFER_PORTS}"),
            *(
                "--engine.max_model_len=512",
                "--engine.threads=1",
                "--disagg.policy=always_remote",
                *(*self._join, *self._flags),
            ),
        ]
        log = self._folder / f"{host.name}.log"
        self.workers[host.name] = host.spawn(*words, log=log, environment=self._environment)

    async def doctor(self, host: Host) -> str:
        """Return what `tandem doctor` says on a host."""
        done = await asyncio.to_thread(
            subprocess.run,
            host.command(*_command("doctor"), *self._join),
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
        )
        return done.stdout + done.stderr

    async def report(self) -> ClusterReport | None:
        flags = [Flag(*word.split("=", 1)) for word in self._join if "=" in word]
        pairs = zip(self._join[0:4:2], self._join[1:4:2], strict=True)
        flags += [Flag(name, value) for name, value in pairs]
        environment = {"TANDEM_RUNTIME__CLUSTER_TOKEN": TOKEN}
        try:
            return await read_cluster(load_config(flags=flags, environment=environment))
        except TandemError:
            return None

    async def set_policy(self, policy: str) -> None:
        """Set `disagg.policy` as a user does, and wait until every worker has it."""
        command = [*_command("config"), "set", "disagg.policy", policy, *self._join]
        done = await asyncio.to_thread(
            subprocess.run, command, env=self._environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

        async def is_set() -> bool:
            report = await self.report()
            workers = [each.worker for each in (report.instances if report else []) if each.worker]
            found = [worker.details["disagg.policy"] for worker in workers]
            return found == [policy] * len(self.workers)

        await eventually(is_set, pause_s=0.2)

    async def has_forgotten_one(self) -> bool:
        """True when discovery has the workers of all hosts but one."""
        report = await self.report()
        instances = [each.instance for each in report.instances] if report else []
        return sum(instance.component == "decode" for instance in instances) == 2

    async def until_serving(self, count: int) -> None:
        async def serve() -> bool:
            for name, process in self.workers.items():
                assert process.poll() is None, (self._folder / f"{name}.log").read_text()[-2000:]
            report = await self.report()
            serving = [
                each.instance
                for each in (report.instances if report else [])
                if each.instance.component == "decode" and each.state == "serving"
            ]
            return len(serving) == count

        await eventually(serve, timeout_s=120, pause_s=0.2)


def _command(role: str) -> list[str]:
    return [sys.executable, "-P", "-m", "tandem.launch", role]
