"""The `tandem` command. Commands import their rooms when they run, so that help is instant."""

import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tandem.config.flags import split_flags
from tandem.config.session import Session
from tandem.launch.cli import operate, passed_on
from tandem.launch.cli.config_commands import config_app
from tandem.launch.cli.options import (
    CONFIG_HELP,
    cluster_session,
    frontend_session,
    shares,
    with_engine,
)
from tandem.launch.cli.slurm_commands import slurm_app
from tandem.launch.run.options import LaunchOptions, ModelOptions
from tandem.runtime.errors import ConfigError, TandemError
from tandem.runtime.local.home import give_home
from tandem.runtime.wire.cluster_messages import WorkerRole

_GC_THRESHOLD = 100_000  # at Python's own 700, looking for garbage is a sixth of a worker's start
JOIN_EXAMPLE = "--nats-url nats://10.0.0.1:4222 --etcd-endpoints http://10.0.0.1:2379"

Gpu = Annotated[
    str | None,
    typer.Option(help="GPU index, of --tp several as in 0,1, `cpu` or `auto`; by default auto."),
]

app = typer.Typer(
    name="tandem",
    epilog="Start with: tandem serve",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(operate.app)
app.add_typer(passed_on.app)
app.add_typer(config_app, name="config")
app.add_typer(slurm_app, name="slurm")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tandem {version('tandem-serve')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Serve large language models with prefill and decode on separate workers."""


@app.command(epilog=f"Example: tandem serve bundled --topology disagg-2p2d -p 8080. {CONFIG_HELP}")
@shares(model=ModelOptions, session=with_engine(frontend_session), options=LaunchOptions)
def serve(
    model: ModelOptions,
    session: Session,
    options: LaunchOptions,
    topology: Annotated[
        str | None,
        typer.Option("--topology", "-t", help="aggregated, disagg-1p1d, disagg-2p2d, or a file."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Workers of both roles; by default one per GPU, two on a CPU."
        ),
    ] = None,
    planner: Annotated[
        operate.Mode | None, typer.Option(help="With a planner, as in tandem planner.")
    ] = None,
) -> None:
    """Serve a model on this machine: one address, its workers, NATS and etcd included.

    NATS and etcd are started here unless --nats-url and --etcd-endpoints name others.
    """
    _quiet_grpc()
    from tandem.launch.serve.serve_supervisor import run_serve

    session.set("planner.mode", planner, "--planner")
    effective, with_planner = session.load(), planner is not None
    raise typer.Exit(
        run_serve(effective, options, model, topology, workers, with_planner=with_planner)
    )


@app.command(epilog=f"Example: tandem frontend --port 8000 {JOIN_EXAMPLE}. {CONFIG_HELP}")
@shares(session=frontend_session)
def frontend(session: Session) -> None:
    """Run one frontend: the OpenAI-compatible address of a cluster.

    It serves every model that the decode workers of its namespace register.
    """
    from tandem.launch.run.frontends import run_frontend_role

    run_frontend_role(session.load())


@app.command(epilog=f"Example: tandem worker Qwen/Qwen3-0.6B --gpu 0 {JOIN_EXAMPLE}. {CONFIG_HELP}")
@shares(model=ModelOptions, session=with_engine(cluster_session))
def worker(
    model: ModelOptions,
    session: Session,
    gpu: Gpu = None,
    role: Annotated[
        WorkerRole, typer.Option("--role", "-r", help="Its first role; tandem role changes it.")
    ] = "both",
) -> None:
    """Run one worker: it generates tokens, and computes prompts of others when it has room."""
    from tandem.launch.run.roles import run_worker_role

    run_worker_role(role, session.load(), model, gpu)


@app.command(
    epilog=f"Example: tandem prefill Qwen/Qwen3-0.6B --gpu 0 {JOIN_EXAMPLE}. {CONFIG_HELP}"
)
@shares(model=ModelOptions, session=with_engine(cluster_session))
def prefill(model: ModelOptions, session: Session, gpu: Gpu = None) -> None:
    """Run one prefill worker, which takes prompts from the queue and delivers their KV."""
    from tandem.launch.run.roles import run_worker_role

    run_worker_role("prefill", session.load(), model, gpu)


@app.command(epilog=f"Example: tandem decode Qwen/Qwen3-0.6B --gpu 1 {JOIN_EXAMPLE}. {CONFIG_HELP}")
@shares(model=ModelOptions, session=with_engine(cluster_session))
def decode(model: ModelOptions, session: Session, gpu: Gpu = None) -> None:
    """Run one decode worker, which generates tokens and chooses where a prompt is prefilled."""
    from tandem.launch.run.roles import run_worker_role

    run_worker_role("decode", session.load(), model, gpu)


@app.command(
    epilog="Example: tandem run hello_world:Frontend -f config.yaml --Backend.ServiceArgs.workers=2"
)
@shares(session=frontend_session, options=LaunchOptions)
def run(
    session: Session,
    options: LaunchOptions,
    graph: Annotated[str, typer.Argument(help="The class to run: module:Class.")],
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="YAML file with a section per service.")
    ] = None,
    with_frontend: Annotated[
        bool, typer.Option("--with-frontend", help="Run an OpenAI-compatible frontend as well.")
    ] = False,
) -> None:
    """Run a class decorated with @service, and all services that it depends on.

    They join the cluster that runs on this machine, or the one whose addresses are given; NATS and
    etcd are started where there is none. --Class.key=VALUE sets a key of a service.
    """
    _quiet_grpc()
    from tandem.launch.graph.graph_supervisor import run_graph

    raise typer.Exit(run_graph(session, options, graph, file, with_frontend=with_frontend))


def _quiet_grpc() -> None:
    """Turn off gRPC's fork handlers, which would warn at every start of a child.

    gRPC reads the variable when it is imported.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def _read_names_as_utf8() -> None:
    """Start this program anew in Python's UTF-8 mode where the locale has another encoding.

    The name of a model's folder becomes text in JSON; the names that other encodings read do not.
    Child processes inherit the mode.
    """
    if sys.getfilesystemencoding() != "utf-8":
        words = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
        os.execve(sys.executable, words, os.environ | {"PYTHONUTF8": "1"})


def main() -> None:
    """Run the command. An error is one line and an exit code: 2 for a config error, else 1."""
    gc.set_threshold(_GC_THRESHOLD)  # what is imported stays; a role that is up has its own
    _read_names_as_utf8()
    give_home(lambda text: print(f"warning: {text}", file=sys.stderr))
    try:
        words = sys.argv[1:]
        passes_on = bool(words) and words[0] in passed_on.NAMES
        words, flags = (words, []) if passes_on else split_flags(words)
        app(args=words, obj=Session(flags))
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
