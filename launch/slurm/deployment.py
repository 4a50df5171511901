"""A deployment on Slurm: its settings, and its files in a folder that all nodes share."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import msgspec
import yaml

from tandem.config.model import EffectiveConfig, load_config
from tandem.config.sources import Setting
from tandem.engine.config import EngineConfig
from tandem.launch.serve.plan import RolePlan
from tandem.launch.slurm.turn import Services, serving
from tandem.launch.supervise.run_dir import make_run_dir
from tandem.runtime.errors import ConfigError, NotFoundError
from tandem.runtime.local.home import writable_home
from tandem.runtime.local.private_file import write_private
from tandem.runtime.wire.cluster_messages import WorkerRole

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,60}")
ORIGIN = "tandem slurm"


class JobOptions(msgspec.Struct, frozen=True):
    """Options of sbatch for one kind of job; those that are None or 0 are left to Slurm."""

    partition: str | None = None
    time: str | None = None  # as Slurm writes it: 24:00:00
    gpus: int = 0
    cpus: int = 0
    others: tuple[str, ...] = ()  # as typed: --account=x


class Deployment(msgspec.Struct, frozen=True):
    """One service job and its workers, each of which is an element of an array of jobs."""

    name: str
    folder: str
    launch: tuple[str, ...]  # the words that start `tandem` on a node
    model: str
    model_name: str | None
    role: WorkerRole
    interface: str
    num_workers: int
    num_spare: int
    service: JobOptions
    worker: JobOptions
    notice_s: int  # from Slurm's signal to the end of a job's time
    max_requeues: int
    has_standby: bool = True  # a second service job
    has_planner: bool = False  # in the service job whose turn it is

    @property
    def standby_job(self) -> str:
        """The name of the second service job."""
        return f"{self.name}-standby"

    @property
    def worker_job(self) -> str:
        """The name of the workers' jobs; that of the first service job is `name`."""
        return f"{self.name}-worker"

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def services_file(self) -> Path:
        """Addresses of NATS, etcd and the frontend: written by the service job once it serves."""
        return self.path / "services.json"

    def log(self, worker: int | None = None) -> Path:
        """The log of a worker, or of the service job."""
        return self.path / "logs" / ("service.log" if worker is None else f"worker-{worker}.log")

    def process_file(self, job_id: str) -> Path:
        """The file in which a worker's job notes the host and the pid of its worker."""
        return self.path / "workers" / job_id

    def services(self) -> Services | None:
        """Return the addresses of NATS, etcd and the frontend; None before there are any."""
        return serving(self.services_file)

    def scaled(self, num_workers: int) -> "Deployment":
        return msgspec.structs.replace(self, num_workers=num_workers)

    def drain_timeout_s(self) -> float:
        """Return the time that a worker takes to leave at most (s)."""
        return load_config(file=self.path / "config.yaml").config.runtime.drain_timeout_s

    def save(self) -> None:
        write_private(self.path / "deployment.json", msgspec.json.encode(self).decode())

    def effective(self) -> EffectiveConfig:
        """Return the config that joins the cluster. Raise ConfigError while it has no services."""
        secrets = _read_secrets(self.path / "secrets")
        config = load_config(file=self.path / "config.yaml", environment=secrets)
        services = Setting("runtime.services_file", str(self.services_file), ORIGIN)
        return config.with_settings([services])


def folder_of(name: str, wanted: Path | None) -> Path:
    """Return the state folder of a deployment. Raise ConfigError for a name that cannot be one."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r}: letters, digits, '_' and '-' only", param="--name")
    return wanted or writable_home() / ".local" / "state" / "tandem" / "slurm" / name


def cores_for(engine: EngineConfig, gpus: int, cores: int) -> int:
    """Return the cores of a worker: `cores`, or as many as its processes have threads on a CPU.

    0 leaves them to Slurm. Raise ConfigError where the processes of a worker do not fit.
    """
    if engine.tp == 1:
        return cores
    if gpus:
        if gpus < engine.tp:
            reason = f"--gpus {gpus}: a worker of --tp {engine.tp} needs as many GPUs"
            raise ConfigError(reason, param="--gpus")
        return cores or engine.tp
    needed = engine.tp * (engine.threads or 1)
    if cores and cores < needed:
        raise ConfigError(
            f"--cpus {cores}: {engine.tp} processes have {needed} threads, each of which needs a "
            "core",
            param="--cpus",
        )
    return cores or needed


def load_deployment(name: str, wanted: Path | None) -> Deployment:
    """Read a deployment from its folder. Raise NotFoundError where there is none."""
    return read_deployment(folder_of(name, wanted))


def read_deployment(folder: Path) -> Deployment:
    """Read the deployment of a folder, with the errors of `load_deployment`."""
    try:
        data = (folder / "deployment.json").read_bytes()
    except OSError as error:
        raise NotFoundError(
            f"no deployment in {folder}: {error.strerror}; `tandem slurm up` makes one"
        ) from error
    try:
        return msgspec.json.decode(data, type=Deployment)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{folder}/deployment.json: {error}") from error


def write_folder(
    deployment: Deployment, config: EffectiveConfig, scripts: Mapping[str, str]
) -> None:
    """Write the state folder: config, secrets and scripts. Raise ConfigError where one cannot."""
    folder = make_run_dir(deployment.path, "--state-dir")
    try:
        for part in ("logs", "workers"):
            (folder / part).mkdir(exist_ok=True)
        for path in [*(folder / "workers").iterdir(), *(folder / "logs").iterdir()]:
            path.unlink()  # of an earlier deployment
        deployment.services_file.unlink(missing_ok=True)
        plan = RolePlan("slurm", "worker", config)
        sections = yaml.safe_dump(plan.config_sections(), sort_keys=False)
        write_private(folder / "config.yaml", sections)
        lines = [f"export {k}={shlex.quote(v)}\n" for k, v in plan.secret_variables().items()]
        write_private(folder / "secrets", "".join(lines))
        for name, text in scripts.items():
            write_private(folder / name, text)
        deployment.save()
    except OSError as error:
        raise ConfigError(f"--state-dir {folder}: {error.strerror}", param="--state-dir") from error


def _read_secrets(path: Path) -> dict[str, str]:
    words = shlex.split(path.read_text(encoding="utf-8"))
    return dict(word.split("=", 1) for word in words if word != "export")
