"""The `tandem` command. Commands import their rooms when they run, so that help is instant."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tandem.launch.cli.config_commands import config_app
from tandem.launch.cli.options import (
    Json,
    LaunchOptions,
    ModelOptions,
    cluster_session,
    file_session,
    frontend_session,
    shares,
)
from tandem.launch.cli.plan_options import HandoffOptions, LoadOptions, plan_session
from tandem.launch.cli.session import Session
from tandem.launch.config.flags import split_flags
from tandem.runtime.errors import ConfigError, TandemError

CONFIG_HELP = "Any config key can be set with --section.key=VALUE; tandem config show lists them."
JOIN_EXAMPLE = "--nats-url nats://10.0.0.1:4222 --etcd-endpoints http://10.0.0.1:2379"

# for commands that hand their words to a parser of another room
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
PASSES_ON = ("bench", "conformance", "engine")

Gpu = Annotated[str | None, typer.Option(help="GPU index, `cpu` or `auto`; by default auto.")]

app = typer.Typer(
    name="tandem",
    epilog="Start with: tandem serve",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(config_app, name="config")


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
@shares(model=ModelOptions, session=frontend_session, options=LaunchOptions)
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
) -> None:
    """Serve a model on this machine: one address, its workers, NATS and etcd included.

    NATS and etcd are started here unless --nats-url and --etcd-endpoints name others.
    """
    _quiet_grpc()
    from tandem.launch.serve.serve_supervisor import run_serve

    raise typer.Exit(run_serve(session.load(), options, model, topology, workers))


@app.command(epilog=f"Example: tandem frontend --port 8000 {JOIN_EXAMPLE}. {CONFIG_HELP}")
@shares(session=frontend_session)
def frontend(session: Session) -> None:
    """Run one frontend: the OpenAI-compatible address of a cluster.

    It serves every model that the decode workers of its namespace register.
    """
    from tandem.launch.roles import run_frontend_role

    run_frontend_role(session.load())


@app.command(epilog=f"Example: tandem worker Qwen/Qwen3-0.6B --gpu 0 {JOIN_EXAMPLE}. {CONFIG_HELP}")
@shares(model=ModelOptions, session=cluster_session)
def worker(
    model: ModelOptions,
    session: Session,
    gpu: Gpu = None,
    role: Annotated[
        str, typer.Option("--role", "-r", help="both, decode or prefill; tandem role changes it.")
    ] = "both",
) -> None:
    """Run one worker: it generates tokens, and computes prompts of others when it has room."""
    from tandem.launch.change_role import checked_role
    from tandem.launch.roles import run_worker_role

    run_worker_role(checked_role(role), session.load(), model, gpu)


@app.command(
    epilog=f"Example: tandem prefill Qwen/Qwen3-0.6B --gpu 0 {JOIN_EXAMPLE}. {CONFIG_HELP}"
)
@shares(model=ModelOptions, session=cluster_session)
def prefill(model: ModelOptions, session: Session, gpu: Gpu = None) -> None:
    """Run one prefill worker, which takes prompts from the queue and delivers their KV."""
    from tandem.launch.roles import run_worker_role

    run_worker_role("prefill", session.load(), model, gpu)


@app.command(epilog=f"Example: tandem decode Qwen/Qwen3-0.6B --gpu 1 {JOIN_EXAMPLE}. {CONFIG_HELP}")
@shares(model=ModelOptions, session=cluster_session)
def decode(model: ModelOptions, session: Session, gpu: Gpu = None) -> None:
    """Run one decode worker, which generates tokens and chooses where a prompt is prefilled."""
    from tandem.launch.roles import run_worker_role

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


@app.command(epilog="Example: tandem status --json")
@shares(session=cluster_session)
def status(session: Session, as_json: Json = False) -> None:
    """Show a cluster: instances, queue depth, KV use, thresholds in force.

    By default it is the cluster that `tandem serve` runs on this machine.
    """
    from tandem.launch.status import run_status

    run_status(session.load_for_cluster(), as_json=as_json)


@app.command(epilog="Example: tandem ui --port 8001")
@shares(session=cluster_session)
def ui(
    session: Session,
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="0: a free one.")] = 0,
) -> None:
    """Show the live page of a cluster that has no frontend, on this machine alone, until Ctrl-C.

    It is a frontend of its own: the page shows all workers, and the requests that it answers.
    """
    from tandem.launch.roles import run_page

    run_page(session.load_for_cluster(), port)


@app.command(epilog="Example: tandem top")
@shares(session=cluster_session)
def top(
    session: Session,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            help="Environment variable with an API key that reads the frontends' metrics."
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.5, max=60.0, help="Seconds between two readings.")
    ] = 2.0,
) -> None:
    """Show a cluster live in the terminal: workers, queue, latencies, causes; q ends it."""
    from tandem.launch.top.command import run_top

    run_top(session.load_for_cluster, api_key_env, interval)


@app.command(name="role", epilog="Example: tandem role 3f2a prefill")
@shares(session=cluster_session)
def change_role(
    session: Session,
    instance: Annotated[str, typer.Argument(help="The worker's id, or how it begins.")],
    role: Annotated[str, typer.Argument(help="both, decode or prefill.")],
) -> None:
    """Change the role of a running worker; it keeps its weights and its prefix cache.

    Running answers go on at other workers. The command ends when the new role serves.
    """
    from tandem.launch.change_role import run_change_role

    run_change_role(session.load_for_cluster(), instance, role)


@app.command(epilog="Example: tandem control 3f2a profile --duration-s 2")
@shares(session=cluster_session)
def control(
    session: Session,
    instance: Annotated[str, typer.Argument(help="The worker's id, or how it begins.")],
    name: Annotated[str, typer.Argument(help="clear-prefix-cache or profile.")],
    duration_s: Annotated[
        float, typer.Option("--duration-s", min=0.001, max=10, help="Of a profile, in seconds.")
    ] = 1.0,
) -> None:
    """Send a command to the engine of a running worker.

    clear-prefix-cache frees the cached blocks that no request holds. profile records the engine
    with torch.profiler, and the worker writes a Chrome trace on its machine.
    """
    from tandem.launch.control import run_control

    run_control(session.load_for_cluster(), instance, name, duration_s)


@app.command(
    epilog="Example: tandem plan --workers 4 --trace mooncake.jsonl --ttft-target-ms 500 "
    f"--output best.yaml. {CONFIG_HELP}"
)
@shares(load=LoadOptions, handoff=HandoffOptions, session=plan_session)
def plan(
    session: Session,
    load: LoadOptions,
    handoff: HandoffOptions,
    workers: Annotated[
        int, typer.Option("--workers", "-w", min=1, max=64, help="Workers of every layout.")
    ] = 2,
    costs: Annotated[
        Path | None,
        typer.Option(help="JSON file with `costs`, as tandem status --json has them in a `load`."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the best layout's topology.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG: TTFT, ITL, throughput.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate a load on every layout of some workers, and find the best one.

    The costs of steps come from a running worker, or from --costs. Nothing is started.
    """
    from tandem.launch.simulation.command import PlanOptions, run_plan

    effective = session.load() if costs is not None else session.load_for_cluster()
    options = PlanOptions(workers, costs, output, plot, as_json)
    run_plan(effective, load, handoff, options)


@app.command(epilog="Example: tandem doctor Qwen/Qwen3-0.6B --json")
@shares(session=file_session)
def doctor(
    session: Session,
    model: Annotated[str, typer.Argument(help="also check this folder or hub id")] = "",
    as_json: Json = False,
) -> None:
    """Check this machine: versions, GPU, CUDA IPC, NIXL, NATS, etcd, ports, limits.

    With MODEL also: the code that would serve it, the memory that it takes, what is missing.

    Every line is ok, warn or fail, with a remedy. The exit code is 1 when a check failed.
    """
    from tandem.launch.doctor.command import run_doctor

    try:
        effective = session.load_for_cluster()
    except ConfigError:  # several clusters run here; the checks of this machine need none of them
        effective = session.load()
    raise typer.Exit(run_doctor(effective, model, as_json=as_json))


@app.command(context_settings=PASS_ON, epilog="Example: tandem bench --help")
def bench(ctx: typer.Context) -> None:
    """Measure latency, throughput and goodput of any server with the OpenAI API."""
    from tandem.bench.load.cli import main as run_bench

    raise typer.Exit(run_bench(ctx.args))


@app.command(
    context_settings=PASS_ON,
    epilog="Example: tandem engine my_engine:MyEngine --model-name my-model",
)
def engine(ctx: typer.Context) -> None:
    """Serve models with your own engine: module:Engine, then the engine's arguments."""
    from tandem.launch.cli.engine_command import run_engine

    run_engine(ctx.args)


@app.command(
    context_settings=PASS_ON,
    epilog="Example: tandem conformance tandem.sdk.sample_engine:SampleEngine",
)
def conformance(ctx: typer.Context) -> None:
    """Check your own engine against the engine contract: module:Engine, then its arguments."""
    from tandem.sdk.conformance.kit import main as check

    raise typer.Exit(check(ctx.args))


def _quiet_grpc() -> None:
    """Turn off gRPC's fork handlers, which would warn at every start of a child.

    gRPC reads the variable when it is imported.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def main() -> None:
    """Run the command. An error is one line and an exit code: 2 for a config error, else 1."""
    try:
        words = sys.argv[1:]
        passes_on = bool(words) and words[0] in PASSES_ON
        words, flags = (words, []) if passes_on else split_flags(words)
        app(args=words, obj=Session(flags))
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
