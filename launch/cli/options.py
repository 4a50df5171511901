"""Options that several commands share, and the decorator that gives them to a command."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from tandem.config.session import Session

T = TypeVar("T")

CONFIG_HELP = "Any config key can be set with --section.key=VALUE; tandem config show lists them."
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def shares(**makers: Callable[..., Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorate a command or a maker: a parameter named in `makers` is made from options.

    The options are the parameters of the maker; they follow the own options.
    """
    shared = {name: list(inspect.signature(maker).parameters) for name, maker in makers.items()}

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(command)
        def run(**values: Any) -> T:
            for name, maker in makers.items():
                values[name] = maker(**{option: values.pop(option) for option in shared[name]})
            return command(**values)

        parameters = inspect.signature(command).parameters
        own = [parameter for name, parameter in parameters.items() if name not in makers]
        for maker in makers.values():
            own += inspect.signature(maker).parameters.values()
        keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
        return run

    return decorate


def with_engine(session_of: Callable[..., Session]) -> Callable[..., Session]:
    """Return `session_of` with the options of engines."""

    @shares(session=session_of)
    def make(
        session: Session,
        tp: Annotated[
            int | None,
            typer.Option(help="Processes that compute the model together: 1, 2, 4 or 8."),
        ] = None,
        emulate: Annotated[
            str | None,
            typer.Option(help="Emulate a device, as in h100/llama-3.1-8b, or a profile's file."),
        ] = None,
        pace: Annotated[
            float | None,
            typer.Option(help="Let time run so many times slower, in all processes."),
        ] = None,
    ) -> Session:
        """Return the session of a command that runs engines."""
        session.set("engine.tp", tp, "--tp")
        session.set("engine.emulate", emulate, "--emulate")
        session.set("runtime.pace", pace, "--pace")
        return session

    return make


def file_session(
    ctx: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file of config sections.")
    ] = None,
) -> Session:
    """Return the session of this call with its config file."""
    session = ctx.find_object(Session)
    assert session is not None, "main() passes one"
    session.file = config
    return session


@shares(session=file_session)
def cluster_session(
    session: Session,
    nats_url: Annotated[
        str | None, typer.Option(help="NATS to join, as in nats://10.0.0.1:4222.")
    ] = None,
    etcd_endpoints: Annotated[
        str | None,
        typer.Option(help="etcd to join, as in http://10.0.0.1:2379; commas between several."),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Separates clusters that share NATS and etcd.")
    ] = None,
) -> Session:
    """Return the session of a command that belongs to a cluster."""
    session.set("runtime.nats_url", nats_url, "--nats-url")
    session.set("runtime.etcd_endpoints", etcd_endpoints, "--etcd-endpoints")
    session.set("runtime.namespace", namespace, "--namespace")
    return session


@shares(session=cluster_session)
def frontend_session(
    session: Session,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; by default 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", "--http-port", "-p", help="Port to listen on; by default 8000."),
    ] = None,
) -> Session:
    """Return the session of a command that runs a frontend."""
    session.set("frontend.host", host, "--host")
    session.set("frontend.port", port, "--port")
    return session


@shares(session=cluster_session)
def plan_session(
    session: Session,
    ttft_target_ms: Annotated[
        float | None, typer.Option(help="Target of the time to first token.")
    ] = None,
    itl_target_ms: Annotated[
        float | None, typer.Option(help="Target of the time between two tokens.")
    ] = None,
) -> Session:
    """Return the session of a plan: its targets, and the cluster whose workers have the costs."""
    session.set("disagg.ttft_target_ms", ttft_target_ms, "--ttft-target-ms")
    session.set("disagg.itl_target_ms", itl_target_ms, "--itl-target-ms")
    return session
