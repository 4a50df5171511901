"""The `tandem` command. Commands import what they run when they run, so that help is instant."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tandem.launch.cli.arguments import Session, split_config_flags
from tandem.launch.cli.config_commands import config_app
from tandem.launch.cli.options import (
    ConfigFile,
    EtcdEndpoints,
    Gpu,
    Host,
    Json,
    Model,
    Namespace,
    NatsUrl,
    Port,
    ServedName,
    join_session,
)
from tandem.runtime.errors import ConfigError, TandemError

CONFIG_HELP = "Any config key can be set with --section.key=VALUE; tandem config show lists them."
JOIN_EXAMPLE = "--nats-url nats://10.0.0.1:4222 --etcd-endpoints http://10.0.0.1:2379"

# for commands that hand their words to a parser of another room
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
PASSES_ON = ("bench", "conformance", "engine")

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
def serve(
    ctx: typer.Context,
    model: Model = "bundled",
    topology: Annotated[
        str,
        typer.Option("--topology", "-t", help="aggregated, disagg-1p1d, disagg-2p2d, or a file."),
    ] = "disagg-1p1d",
    host: Host = None,
    port: Port = None,
    config: ConfigFile = None,
    nats_url: NatsUrl = None,
    etcd_endpoints: EtcdEndpoints = None,
    namespace: Namespace = None,
    served_model_name: ServedName = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for logs; a new temporary one by default.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the roles' logs.")] = False,
    start_timeout_s: Annotated[float, typer.Option(help="Longest time to become ready (s).")] = 600,
) -> None:
    """Serve a model on this machine: one address, its workers, NATS and etcd included.

    NATS and etcd are started here unless --nats-url and --etcd-endpoints name others.
    """
    # gRPC reads it when it is imported; its fork handlers would warn at every start of a role
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from tandem.launch.serve.command import ServeArguments, run_serve

    session = join_session(ctx, config, nats_url, etcd_endpoints, namespace)
    session.set("frontend.host", host, "--host")
    session.set("frontend.port", port, "--port")
    arguments = ServeArguments(
        model, topology, served_model_name, run_dir, verbose, start_timeout_s
    )
    raise typer.Exit(run_serve(session.load(), arguments))


@app.command(epilog=f"Example: tandem frontend --port 8000 {JOIN_EXAMPLE}. {CONFIG_HELP}")
def frontend(
    ctx: typer.Context,
    host: Host = None,
    port: Port = None,
    config: ConfigFile = None,
    nats_url: NatsUrl = None,
    etcd_endpoints: EtcdEndpoints = None,
    namespace: Namespace = None,
) -> None:
    """Run one frontend: the OpenAI-compatible address of a cluster.

    It serves every model that the decode workers of its namespace register.
    """
    from tandem.launch.roles import run_frontend_role

    session = join_session(ctx, config, nats_url, etcd_endpoints, namespace)
    session.set("frontend.host", host, "--host")
    session.set("frontend.port", port, "--port")
    run_frontend_role(session.load())


@app.command(
    epilog=f"Example: tandem prefill Qwen/Qwen3-0.6B --gpu 0 {JOIN_EXAMPLE}. {CONFIG_HELP}"
)
def prefill(
    ctx: typer.Context,
    model: Model = "bundled",
    gpu: Gpu = None,
    config: ConfigFile = None,
    nats_url: NatsUrl = None,
    etcd_endpoints: EtcdEndpoints = None,
    namespace: Namespace = None,
    served_model_name: ServedName = None,
) -> None:
    """Run one prefill worker: takes prompts from the queue and delivers their KV."""
    from tandem.launch.roles import run_prefill_role

    session = join_session(ctx, config, nats_url, etcd_endpoints, namespace)
    run_prefill_role(session.load(), model, gpu, served_model_name)


@app.command(epilog=f"Example: tandem decode Qwen/Qwen3-0.6B --gpu 1 {JOIN_EXAMPLE}. {CONFIG_HELP}")
def decode(
    ctx: typer.Context,
    model: Model = "bundled",
    gpu: Gpu = None,
    config: ConfigFile = None,
    nats_url: NatsUrl = None,
    etcd_endpoints: EtcdEndpoints = None,
    namespace: Namespace = None,
    served_model_name: ServedName = None,
) -> None:
    """Run one decode worker: generates tokens, and decides who prefills each prompt."""
    from tandem.launch.roles import run_decode_role

    session = join_session(ctx, config, nats_url, etcd_endpoints, namespace)
    run_decode_role(session.load(), model, gpu, served_model_name)


@app.command(
    epilog="Example: tandem run hello_world:Frontend -f config.yaml --Backend.ServiceArgs.workers=2"
)
def run(
    ctx: typer.Context,
    graph: Annotated[str, typer.Argument(help="module:Class, the service to start with.")],
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="YAML file with a section per service.")
    ] = None,
    with_frontend: Annotated[
        bool, typer.Option("--with-frontend", help="Run an OpenAI-compatible frontend beside it.")
    ] = False,
    host: Host = None,
    port: Port = None,
    config: ConfigFile = None,
    nats_url: NatsUrl = None,
    etcd_endpoints: EtcdEndpoints = None,
    namespace: Namespace = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for logs; a new temporary one by default.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the services' logs.")] = (
        False
    ),
    start_timeout_s: Annotated[float, typer.Option(help="Longest time to become ready (s).")] = 600,
) -> None:
    """Run the services that a class decorated with @service depends on, and itself.

    It joins the cluster that runs on this machine, or one whose addresses are given, and starts
    NATS and etcd where there is none. --Class.key=VALUE sets what a class is told.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # as in serve
    from tandem.launch.graph.run import RunArguments, run_graph

    session = join_session(ctx, config, nats_url, etcd_endpoints, namespace)
    session.set("frontend.host", host, "--host")
    session.set("frontend.port", port, "--port")
    arguments = RunArguments(graph, file, with_frontend, run_dir, verbose, start_timeout_s)
    raise typer.Exit(run_graph(session, arguments))


@app.command(epilog="Example: tandem status --json")
def status(
    ctx: typer.Context,
    config: ConfigFile = None,
    nats_url: NatsUrl = None,
    etcd_endpoints: EtcdEndpoints = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Show a cluster: instances, queue depth, KV use, thresholds in force.

    Without addresses it is the cluster that `tandem serve` runs on this machine.
    """
    from tandem.launch.status import run_status

    session = join_session(ctx, config, nats_url, etcd_endpoints, namespace)
    run_status(session.load_for_cluster(), as_json=as_json)


@app.command(epilog="Example: tandem doctor --json")
def doctor(ctx: typer.Context, config: ConfigFile = None, as_json: Json = False) -> None:
    """Check this machine: versions, GPU, CUDA IPC, NIXL, NATS, etcd, ports, limits.

    Every line says ok, warn or fail, and what to do. The exit code is 1 when something failed.
    """
    from tandem.launch.doctor.command import run_doctor

    session = join_session(ctx, config)
    try:
        effective = session.load_for_cluster()
    except ConfigError:  # several clusters run here: which one is not doctor's question
        effective = session.load()
    raise typer.Exit(run_doctor(effective, as_json=as_json))


@app.command(context_settings=PASS_ON, epilog="Example: tandem bench --help")
def bench(ctx: typer.Context) -> None:
    """Measure latency, throughput and goodput of anything that speaks the OpenAI API."""
    from tandem.bench.load.cli import app as bench_app

    bench_app(args=ctx.args, prog_name="tandem bench")


@app.command(
    context_settings=PASS_ON,
    epilog="Example: tandem engine my_engine:MyEngine --model-name my-model",
)
def engine(ctx: typer.Context) -> None:
    """Serve models with an engine of yours: module:Engine, then the engine's own arguments."""
    from tandem.launch.cli.engine_command import run_engine

    run_engine(ctx.args)


@app.command(
    context_settings=PASS_ON,
    epilog="Example: tandem conformance tandem.sdk.sample_engine:SampleEngine",
)
def conformance(ctx: typer.Context) -> None:
    """Check that an engine of yours keeps its contract: module:Engine, then its arguments."""
    from tandem.sdk.conformance.kit import main as check

    raise typer.Exit(check(ctx.args))


def main() -> None:
    """The entry point: an error is one line and an exit code, 2 for a config's and 1 for others."""
    try:
        arguments, flags = sys.argv[1:], list[str]()
        if arguments[:1] not in [[command] for command in PASSES_ON]:
            arguments, flags = split_config_flags(arguments)
        app(args=arguments, obj=Session(flags))
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
