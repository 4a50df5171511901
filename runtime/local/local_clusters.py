"""The clusters that `tandem serve` runs on this machine, for other commands to find."""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from tandem.runtime.errors import ConfigError
from tandem.runtime.local.home import writable_home
from tandem.runtime.local.private_file import write_private

logger = logging.getLogger(__name__)


def this_system() -> str:
    """Return what tells apart the systems of a shared home folder: its host and its container."""
    try:
        pids = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        pids = 0
    return f"{os.uname().nodename}-{pids}"


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """The addresses of a cluster that a launcher of this machine serves."""

    pid: int
    started_s: float  # start of the process, as `started_s` returns it
    namespace: str
    nats_url: str
    etcd_endpoints: str
    http_url: str
    run_dir: str
    control: str = ""  # socket of `tandem rollout`; empty: there is none
    system: str = field(default_factory=this_system)  # which has the process

    def runtime_values(self) -> dict[str, str]:
        """Return the fields of RuntimeConfig that lead to the cluster, its token included."""
        values = {
            "namespace": self.namespace,
            "nats_url": self.nats_url,
            "etcd_endpoints": self.etcd_endpoints,
        }
        with contextlib.suppress(OSError):  # no token, or another user's
            values["cluster_token"] = token_path(Path(self.run_dir)).read_text(encoding="utf-8")
        return values


def token_path(run_dir: Path) -> Path:
    """Return the file with the cluster token of a launch."""
    return run_dir / "cluster_token"


def state_dir() -> Path:
    """Return the folder with one file per cluster. Raise OSError for a user who cannot keep any."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else writable_home() / ".local" / "state") / "tandem" / "clusters"


@contextlib.contextmanager
def announced(
    cluster: LocalCluster, warn: Callable[[str], object] = logger.warning
) -> Iterator[None]:
    """List a cluster while it is served; call `warn` where the list cannot be written."""
    path: Path | None = None
    try:
        path = state_dir() / f"{cluster.system}-{cluster.pid}.json"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path, json.dumps(asdict(cluster)))  # its nats_url has a password
    except OSError as error:
        warn(f"other commands need the addresses of this cluster, it cannot be listed: {error}")
    try:
        yield
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()


def started_s(pid: int) -> float:
    """Return the start of a process, which differs from that of a later one with the same pid.

    The unit is seconds since the boot: the time of day may be set while the process runs. Raise
    psutil.Error for no such process.
    """
    return psutil.Process(pid).create_time() - psutil.boot_time()


def running_clusters() -> list[LocalCluster]:
    """Return the clusters whose launcher is alive; delete the records of dead ones.

    Other systems' launchers, which are not seen from here, are left to them.
    """
    clusters, system = list[LocalCluster](), this_system()
    for path in _records():
        try:
            cluster = LocalCluster(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):  # of another version, or just deleted
            continue
        if cluster.system != system:
            continue
        try:
            is_alive = abs(started_s(cluster.pid) - cluster.started_s) < 1.0
        except psutil.Error:
            is_alive = False
        if is_alive:
            clusters.append(cluster)
        else:
            path.unlink(missing_ok=True)
    return clusters


def _records() -> list[Path]:
    try:
        return sorted(state_dir().glob("*.json"))
    except OSError:  # nothing can be listed for this user
        return []


def the_running_cluster(namespace: str | None = None) -> LocalCluster | None:
    """Return the only cluster, or the only one of the namespace that is named; None without one.

    Raise ConfigError with the flags that choose one when there are several.
    """
    clusters = running_clusters()
    named = [cluster for cluster in clusters if cluster.namespace == namespace]
    clusters = named or clusters
    if len(clusters) > 1:
        names = [cluster.namespace for cluster in clusters]
        choices = "".join(
            "\n  "
            + (f"--etcd-endpoints {c.etcd_endpoints} " if names.count(c.namespace) > 1 else "")
            + f"--namespace {c.namespace}   ({c.http_url or f'pid {c.pid}'})"
            for c in clusters
        )
        raise ConfigError(f"{len(clusters)} clusters run here; one of these names one:{choices}")
    return clusters[0] if clusters else None


def running_cluster_at(etcd_endpoints: str, namespace: str | None) -> LocalCluster | None:
    """Return the cluster of this etcd and, where one is named, of this namespace; None without."""
    found = [
        cluster
        for cluster in running_clusters()
        if cluster.etcd_endpoints == etcd_endpoints and namespace in (None, cluster.namespace)
    ]
    return found[0] if len({cluster.namespace for cluster in found}) == 1 else None
