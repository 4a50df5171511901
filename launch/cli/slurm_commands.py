"""`tandem slurm`: a deployment as jobs of Slurm."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.config.session import Session
from tandem.launch.cli.operate import Mode
from tandem.launch.cli.options import CONFIG_HELP, file_session, shares, with_engine
from tandem.launch.run.options import ModelOptions
from tandem.runtime.wire.cluster_messages import WorkerRole

if TYPE_CHECKING:
    from tandem.config.model import EffectiveConfig
    from tandem.launch.slurm.deployment import Deployment

slurm_app = typer.Typer(
    help="Serve on a Slurm cluster: run it on a login node.", no_args_is_help=True
)

Timeout = Annotated[float, typer.Option("--timeout-s", help="Longest wait for workers (s).")]


@dataclass(frozen=True, slots=True)
class Place:
    """The deployment that a command is about."""

    name: Annotated[str, typer.Option(help="Name of the deployment and of its jobs.")] = "tandem"
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of its state, shared by all nodes; by default in the home folder, under "
            ".local/state/tandem/slurm."
        ),
    ] = None

    def load(self) -> "Deployment":
        from tandem.launch.slurm.deployment import load_deployment

        return load_deployment(self.name, self.state_dir)


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a deployment to make."""

    workers: Annotated[int, typer.Option("--workers", "-w", min=1, max=512)] = 2
    spare: Annotated[
        int,
        typer.Option(
            min=0,
            max=64,
            help="Workers beside them, for the time in which Slurm requeues a lost one.",
        ),
    ] = 0
    standby: Annotated[
        bool,
        typer.Option(
            help="A second service job, on another node, which takes over when the first is lost."
        ),
    ] = True
    planner: Annotated[
        Mode | None,
        typer.Option(
            help="With a planner of their number in the service job: advise or act, up to "
            "--planner.max_workers, spare ones included."
        ),
    ] = None
    role: Annotated[WorkerRole, typer.Option("--role", "-r", help="Role of the workers.")] = "both"
    partition: Annotated[str | None, typer.Option("--partition", "-p")] = None
    time: Annotated[
        str | None, typer.Option(help="Time limit of a worker, as in 24:00:00; then another comes.")
    ] = None
    gpus: Annotated[
        int,
        typer.Option(min=0, max=8, help="GPUs of a worker, one for each --tp process; 0: CPU."),
    ] = 1
    cpus: Annotated[
        int,
        typer.Option(
            min=0,
            help="Cores of a worker; 0: one for each thread of its --tp processes, or Slurm's "
            "default without --tp.",
        ),
    ] = 0
    interface: Annotated[
        str, typer.Option(help="Network interface of all nodes, as in ib0; route: by the route.")
    ] = "route"
    service_partition: Annotated[
        str | None, typer.Option(help="Partition of the service job; by default --partition.")
    ] = None
    service_time: Annotated[
        str | None, typer.Option(help="Time limit of the service job; by default the partition's.")
    ] = None
    sbatch: Annotated[
        list[str] | None, typer.Option(help="A further option of all jobs: --sbatch=--account=x.")
    ] = None
    notice_s: Annotated[
        int,
        typer.Option("--notice-s", min=30, help="Time from Slurm's signal to a job's time limit."),
    ] = 120
    max_requeues: Annotated[
        int, typer.Option(min=0, help="Requeues of a job whose process died, or node was lost.")
    ] = 10

    def deployment(
        self, place: Place, model: ModelOptions, config: "EffectiveConfig"
    ) -> "Deployment":
        """Return the deployment. Raise ConfigError for a name or a width that cannot be."""
        from tandem.launch.slurm.deployment import Deployment, JobOptions, cores_for, folder_of
        from tandem.runtime.errors import ConfigError

        if self.planner is not None and config.config.planner.max_workers is None:
            raise ConfigError(
                "--planner needs a bound, as in --planner.max_workers=8", param="--planner"
            )
        others = tuple(self.sbatch or ())
        cpus = cores_for(config.config.engine, self.gpus, self.cpus)
        is_folder = Path(model.model).expanduser().is_dir()
        return Deployment(
            name=place.name,
            folder=str(folder_of(place.name, place.state_dir).expanduser().absolute()),
            launch=(sys.executable, "-P", "-m", "tandem.launch"),
            model=str(Path(model.model).expanduser().absolute()) if is_folder else model.model,
            model_name=model.served_model_name,
            role=self.role,
            interface=self.interface,
            num_workers=self.workers,
            num_spare=self.spare,
            service=JobOptions(
                self.service_partition or self.partition, self.service_time, 0, 1, others
            ),
            worker=JobOptions(self.partition, self.time, self.gpus, cpus, others),
            notice_s=self.notice_s,
            max_requeues=self.max_requeues,
            has_standby=self.standby,
            has_planner=self.planner is not None,
        )


@slurm_app.command(
    epilog="Example: tandem slurm up Qwen/Qwen3-8B --workers 4 -p gpu --time 24:00:00. "
    f"{CONFIG_HELP}"
)
@shares(model=ModelOptions, session=with_engine(file_session), place=Place, jobs=Jobs)
def up(
    model: ModelOptions,
    session: Session,
    place: Place,
    jobs: Jobs,
    timeout_s: Timeout = 600,
) -> None:
    """Submit a deployment, wait until its workers serve, and print its address.

    One job has NATS, etcd and the frontend; each worker is an element of an array of jobs.
    """
    from tandem.launch.slurm.operate import up as run
    from tandem.runtime.process.reporter import Reporter

    session.set("planner.mode", jobs.planner, "--planner")
    config = _config(session)
    with Reporter() as reporter:
        run(jobs.deployment(place, model, config), config, reporter, timeout_s)


@slurm_app.command(epilog="Example: tandem slurm render bundled --gpus 0 > jobs.sh")
@shares(model=ModelOptions, session=with_engine(file_session), place=Place, jobs=Jobs)
def render(model: ModelOptions, session: Session, place: Place, jobs: Jobs) -> None:
    """Print the two scripts that `up` with the same options would submit."""
    from tandem.launch.slurm.scripts import render as scripts

    deployment = jobs.deployment(place, model, session.load())
    for name, text in scripts(deployment).items():
        print(f"# ---- {deployment.path / name}\n{text}")


@slurm_app.command(epilog="Example: tandem slurm status")
@shares(place=Place)
def status(place: Place) -> None:
    """Show the jobs of a deployment, their nodes, and the load of each worker."""
    from tandem.launch.slurm.operate import show_status
    from tandem.runtime.process.reporter import Reporter

    with Reporter() as reporter:
        show_status(place.load(), reporter, 0)


@slurm_app.command(epilog="Example: tandem slurm logs 2")
@shares(place=Place)
def logs(
    place: Place,
    worker: Annotated[
        int | None, typer.Argument(help="Its number; without it the service job.")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1)] = 50,
) -> None:
    """Print the end of a worker's log, or of the service job's."""
    from tandem.launch.slurm.operate import show_log

    show_log(place.load(), worker, lines)


@slurm_app.command(epilog="Example: tandem slurm scale 6")
@shares(place=Place)
def scale(
    place: Place,
    workers: Annotated[int, typer.Argument(min=1, max=512, help="How many are to serve.")],
    timeout_s: Timeout = 600,
) -> None:
    """Submit more workers, or end the least loaded ones after their answers have moved."""
    from tandem.launch.slurm.operate import scale as run
    from tandem.runtime.process.reporter import Reporter

    with Reporter() as reporter:
        run(place.load(), workers, reporter, timeout_s)


@slurm_app.command(epilog="Example: tandem slurm planner --min-workers 2 --max-workers 6")
@shares(place=Place)
def planner(
    place: Place,
    max_workers: Annotated[int, typer.Option(min=1, max=512, help="Most, spare ones included.")],
    min_workers: Annotated[int, typer.Option(min=1, max=512, help="Fewest, likewise.")] = 1,
    mode: Annotated[Mode, typer.Option(help="advise: change nothing; act: do it.")] = "act",
    timeout_s: Timeout = 600,
) -> None:
    """Let the number of workers follow the load, by what scale does, until Ctrl-C."""
    import uvloop

    from tandem.config.sources import Setting
    from tandem.launch.planner.process import run_planner
    from tandem.launch.slurm.executor import SlurmExecutor
    from tandem.runtime.process.reporter import Reporter

    deployment = place.load()
    values = {"mode": mode, "min_workers": min_workers, "max_workers": max_workers}
    own = [Setting(f"planner.{key}", value, "option") for key, value in values.items()]
    with Reporter() as reporter:
        executor = SlurmExecutor(deployment, reporter, timeout_s)
        uvloop.run(run_planner(deployment.effective().with_settings(own), executor))


@slurm_app.command(epilog="Example: tandem slurm roll")
@shares(place=Place)
def roll(place: Place, timeout_s: Timeout = 600) -> None:
    """Restart all workers, one at a time, without a request that fails.

    The successor of a worker serves before the worker ends; where no node is free for it, the
    worker ends first, if another one serves.
    """
    from tandem.launch.slurm.operate import roll as run
    from tandem.runtime.process.reporter import Reporter

    with Reporter() as reporter:
        run(place.load(), reporter, timeout_s)


@slurm_app.command(epilog="Example: tandem slurm down")
@shares(place=Place)
def down(place: Place, timeout_s: Timeout = 600) -> None:
    """End a deployment: the frontend after its answers, then workers and services."""
    from tandem.launch.slurm.operate import down as run
    from tandem.runtime.process.reporter import Reporter

    with Reporter() as reporter:
        run(place.load(), reporter, timeout_s)


@slurm_app.command(hidden=True)
def service(state_dir: Annotated[Path, typer.Option()]) -> None:
    """Run the services of a deployment: the service job's script does."""
    from tandem.launch.slurm.service_job import run_service

    raise typer.Exit(run_service(state_dir))


def _config(session: Session) -> "EffectiveConfig":
    """Return the config for the nodes, with a cluster token."""
    import secrets

    from tandem.config.sources import Setting
    from tandem.launch.slurm.deployment import ORIGIN

    token = Setting("runtime.cluster_token", secrets.token_hex(32), ORIGIN)
    return session.load().with_defaults([token])
