"""A real Slurm on hosts of the test: slurmctld and munged here, a slurmd on each host."""

import secrets
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from tests.hosts import Host, Hosts, end, host_environment, start
from tests.services import PATIENCE_S, free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
# Slurm starts a requeued job when the credential of its last start has expired: 120 s by default
CREDENTIAL_S = 5
CONF = """\
ClusterName=tandem
SlurmctldHost=ctl({address})
SlurmctldPort={port}
SlurmdPort={slurmd_port}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire={credential_s}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core,CR_LLN
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=5
MessageTimeout=5
BatchStartTimeout=3
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=closed Nodes=ALL State=DOWN
"""
CGROUP = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainCores=no
ConstrainRAMSpace=no
ConstrainDevices=no
"""


class SlurmCluster:
    """Slurm over some hosts, `num_cpus` cores each; `with` starts and ends it.

    `has_gpus`: a host has two devices that Slurm takes for GPUs, and two threads on each core.
    """

    def __init__(self, hosts: Hosts, num_cpus: int = 2, *, has_gpus: bool = False) -> None:
        # munged wants every folder on the way to its socket open to all, which pytest's are not
        self._temporary = tempfile.TemporaryDirectory(prefix="slurm-")
        self.hosts, self._folder = hosts, Path(self._temporary.name)
        self._node = f"CPUs={num_cpus} RealMemory=2000"
        self._has_gpus = has_gpus
        if has_gpus:
            cores = f"Sockets=1 CoresPerSocket={num_cpus} ThreadsPerCore=2"
            self._node = f"{cores} RealMemory=2000 Gres=gpu:2"
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.slurmds: dict[str, subprocess.Popen[bytes]] = {}
        self.conf = self._folder / "slurm.conf"
        self.environment = host_environment() | {"SLURM_CONF": str(self.conf)}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        folder = self._folder
        folder.chmod(0o755)
        (folder / "state").mkdir()
        (folder / "cgroup.conf").write_text(CGROUP)
        nodes = "\n".join(
            f"NodeName={host.name} NodeAddr={host.address} {self._node}" for host in self.hosts.all
        )
        if self._has_gpus:
            nodes = f"GresTypes=gpu\n{nodes}"
            devices = ("Name=gpu File=/dev/null", "Name=gpu File=/dev/zero")
            (folder / "gres.conf").write_text("\n".join(devices))
        self.conf.write_text(
            CONF.format(
                address=self.hosts.address,
                port=free_port(),
                slurmd_port=free_port(),
                folder=folder,
                credential_s=CREDENTIAL_S,
                nodes=nodes,
            )
        )
        self._start_munged(folder)
        controller = (
            "unshare",
            "--uts",
            "sh",
            "-c",
            f"hostname ctl; exec slurmctld -D -f {self.conf}",
        )
        with (folder / "ctld.out").open("ab") as output:
            self._daemons.append(start(controller, output, self.environment))
        for host in self.hosts.all:
            self.start_node(host)
        self.until_idle(len(self.hosts.all))

    def _start_munged(self, folder: Path) -> None:
        private = folder / "munge"
        private.mkdir(mode=0o700)
        key = private / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {"key-file": key, "pid-file": private / "pid", "log-file": private / "log"}
        files |= {"seed-file": private / "seed", "socket": folder / "munge.sock"}
        words = [f"--{option}={path}" for option, path in files.items()]
        with (folder / "munged.out").open("ab") as output:
            self._daemons.append(start(["munged", "--foreground", *words], output))
        deadline_s = time.perf_counter() + PATIENCE_S
        while not (folder / "munge.sock").exists():
            assert time.perf_counter() < deadline_s, (folder / "munged.out").read_text()
            time.sleep(0.02)

    def start_node(self, host: Host) -> None:
        """Start a host's slurmd, which is its first process."""
        host.plug()
        words = ("slurmd", "-D", "-N", host.name, "-f", str(self.conf))
        log = self._folder / f"{host.name}.out"
        self.slurmds[host.name] = host.spawn(*words, log=log, environment=self.environment)

    def host(self, name: str) -> Host:
        """The host of a name."""
        return next(host for host in self.hosts.all if host.name == name)

    def kill_node(self, name: str) -> None:
        """Kill the slurmd and every process of a host at once."""
        end(self.slurmds.pop(name))

    def lose_node(self, name: str) -> None:
        """Kill a host that is off the network: its connections get no farewell."""
        self.host(name).unplug()
        self.kill_node(name)

    def end_jobs(self) -> None:
        """Cancel every job, and wait until none is left."""
        self.run("scancel", "--me")
        deadline_s = time.perf_counter() + PATIENCE_S
        while left := self.run("squeue", "-h"):
            assert time.perf_counter() < deadline_s, left
            time.sleep(0.1)

    def shorten(self, job: str) -> None:
        """Let a job's time be so short that Slurm's next look at times is that of a notice.

        It looks every 30 s, and gives a notice of 60 s at most 30 s too early.
        """
        self.run("scontrol", "update", f"JobId={job}", "EndTime=now+85")

    def until_idle(self, count: int) -> None:
        """Wait until so many nodes can take jobs."""
        deadline_s = time.perf_counter() + PATIENCE_S
        while self.run("sinfo", "-h", "-p", "all", "-N", "-t", "idle").count("\n") < count:
            assert time.perf_counter() < deadline_s, self.run("sinfo", "-N", "-l")
            time.sleep(0.1)

    def run(self, *words: str) -> str:
        """Return the output of one of Slurm's commands; empty when it fails."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        return done.stdout

    def __exit__(self, *_: object) -> None:
        for process in [*self.slurmds.values(), *reversed(self._daemons)]:
            end(process)
        self._temporary.cleanup()


def processes_of(part: str, state: Path) -> list[int]:
    """The processes of the deployment in `state` whose command line has `part`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if part in words and str(state) in words and "deathwatch" not in words:
            found.append(int(path.parent.name))
    return sorted(found)
