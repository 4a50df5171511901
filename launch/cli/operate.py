"""The commands of an operator: what runs, what it does, what would be best, what is wrong."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tandem.config.session import Session
from tandem.launch.cli.options import (
    CONFIG_HELP,
    Json,
    cluster_session,
    file_session,
    plan_session,
    shares,
)
from tandem.launch.simulation.options import HandoffOptions, LoadOptions
from tandem.runtime.errors import ConfigError
from tandem.runtime.extras import install_command
from tandem.runtime.wire.cluster_messages import ControlName, WorkerRole

app = typer.Typer()

Mode = Literal["advise", "act"]
WorkerId = Annotated[str, typer.Argument(help="The worker's id, or how it begins.")]


@app.command(epilog="Example: tandem status --json")
@shares(session=cluster_session)
def status(session: Session, as_json: Json = False) -> None:
    """Show a cluster: instances, queue depth, KV use, thresholds in force.

    By default it is the cluster that `tandem serve` runs on this machine. Where several run,
    `--namespace` names one.
    """
    from tandem.launch.cluster.status import run_status

    run_status(session.load_for_cluster(), as_json=as_json)


@app.command(epilog="Example: tandem explain 5f0c2a7e91d34b68")
@shares(session=cluster_session)
def explain(
    session: Session,
    request_id: Annotated[
        str,
        typer.Argument(help="The request's id: the header x-tandem-request-id of its response."),
    ],
    as_json: Json = False,
) -> None:
    """Show the places that were considered for a request's prompt, and why one was chosen.

    For each decode worker and each prefill worker that was compared: the predicted wait, time to
    the first token and delay of all answers. Then the decision, its reason, and the times of the
    request. Decode workers remember their last 1024 requests.
    """
    from tandem.launch.cluster.explain import run_explain

    run_explain(session.load_for_cluster(), request_id, as_json=as_json)


@app.command(epilog="Example: tandem ui --port 8001")
@shares(session=cluster_session)
def ui(
    session: Session,
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="0: a free one.")] = 0,
) -> None:
    """Show the live page of a cluster that has no frontend, on this machine alone, until Ctrl-C.

    It is a frontend of its own: the page shows all workers, and the requests that it answers.
    """
    from tandem.launch.run.frontends import run_page

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
    instance: WorkerId,
    role: Annotated[WorkerRole, typer.Argument(help="The role it gets.")],
) -> None:
    """Change the role of a running worker; it keeps its weights and its prefix cache.

    Running answers go on at other workers. The command ends when the new role serves.
    """
    from tandem.launch.cluster.one_worker import run_change_role

    run_change_role(session.load_for_cluster(), instance, role)


@app.command(epilog=f"Example: tandem planner --mode act. {CONFIG_HELP}")
@shares(session=cluster_session)
def planner(
    session: Session,
    mode: Annotated[
        Mode | None, typer.Option(help="advise (the default): change nothing; act: do it.")
    ] = None,
    deployment: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=NAME",
            help="In a pod: a Deployment whose workers are started and ended. Several times.",
        ),
    ] = None,
) -> None:
    """Follow the load of a cluster: move roles, start and end workers, where that is needed.

    tandem status shows what it sees and why it changes something, or would. The mode is live:
    tandem config set planner.mode act.
    """
    import uvloop

    from tandem.launch.planner.kubernetes import KubernetesApi, KubernetesExecutor
    from tandem.launch.planner.process import run_planner

    session.set("planner.mode", mode, "--mode")
    effective, executor = session.load_for_cluster(), None
    if deployment:
        drain_timeout_s = effective.config.runtime.drain_timeout_s
        executor = KubernetesExecutor(KubernetesApi.of_this_pod(), deployment, drain_timeout_s)
    uvloop.run(run_planner(effective, executor))


@app.command(epilog=f"Example: tandem epp --epp.host=0.0.0.0. {CONFIG_HELP}")
@shares(session=cluster_session)
def epp(session: Session) -> None:
    """Answer a Gateway which frontend and which worker a request should go to.

    It is an endpoint picker of the Gateway API Inference Extension: a gRPC server that Envoy asks.
    """
    import uvloop

    try:
        from tandem.launch.epp.process import run_epp
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: {install_command('gateway')}") from None

    uvloop.run(run_epp(session.load_for_cluster()))


@app.command(epilog="Example: tandem rollout")
def rollout(
    namespace: Annotated[
        str | None, typer.Option(help="Of the cluster, where several run on this machine.")
    ] = None,
) -> None:
    """Replace every process of the `tandem serve` of this machine, one at a time, while it serves.

    Each successor serves before its elder drains, so no request fails: for a newer Tandem, or model
    files that have changed. NATS and etcd stay.
    """
    import uvloop

    from tandem.launch.serve.control import command
    from tandem.runtime.local.local_clusters import the_running_cluster

    cluster = the_running_cluster(namespace)
    if cluster is None or not cluster.control:
        raise ConfigError("no `tandem serve` of this user runs on this machine")
    uvloop.run(command(Path(cluster.control), "rollout", print))


@app.command(epilog="Example: tandem control 3f2a profile --duration-s 2")
@shares(session=cluster_session)
def control(
    session: Session,
    instance: WorkerId,
    name: Annotated[ControlName, typer.Argument(help="The command.")],
    duration_s: Annotated[
        float, typer.Option("--duration-s", min=0.001, max=10, help="Of a profile, in seconds.")
    ] = 1.0,
) -> None:
    """Send a command to the engine of a running worker.

    clear-prefix-cache frees the cached blocks that no request holds. profile records the engine
    with torch.profiler, and the worker writes a Chrome trace on its machine.
    """
    from tandem.launch.cluster.one_worker import run_control

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
    model: Annotated[
        str, typer.Option(help="Take the costs of this model's workers; needed where several run.")
    ] = "",
    emulate: Annotated[
        str | None,
        typer.Option(help="Profile of a device, as tandem serve takes it: steps and links of it."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the best layout's topology.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG: TTFT, ITL, throughput.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate a load on every layout of some workers, and find the best one.

    The costs of steps come from a running worker, from --costs, or from the profile that --emulate
    names. Nothing is started.
    """
    from tandem.launch.simulation.command import PlanOptions, run_plan

    given = [
        name for name, each in (("costs", costs), ("emulate", emulate), ("model", model)) if each
    ]
    if len(given) > 1:
        raise ConfigError(f"--{given[0]} and --{given[1]} exclude each other: each has costs")
    effective = session.load() if costs or emulate else session.load_for_cluster()
    options = PlanOptions(workers, costs, model, emulate, output, plot, as_json)
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
