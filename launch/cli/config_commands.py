"""`tandem config`: show, get, set, unset, watch."""

from typing import Annotated

import typer

from tandem.launch.cli.options import ConfigFile, EtcdEndpoints, Json, Namespace, join_session

config_app = typer.Typer(
    help="Show the configuration, and change what can be changed while serving.",
    no_args_is_help=True,
)

Key = Annotated[str, typer.Argument(help="A live key, such as disagg.max_local_prefill_length.")]


@config_app.command(epilog="Example: tandem config show --disagg.policy=threshold --json")
def show(
    ctx: typer.Context,
    config: ConfigFile = None,
    etcd_endpoints: EtcdEndpoints = None,
    namespace: Namespace = None,
    live: Annotated[
        bool | None,
        typer.Option(
            "--live/--no-live",
            help="With the cluster's live values; by default where one is named or runs here.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print every effective value and where it came from."""
    from tandem.launch.config.live import show_config

    session = join_session(ctx, config, None, etcd_endpoints, namespace)
    effective = session.load_for_cluster() if live is not False else session.load()
    show_config(effective, live=live, as_json=as_json)


@config_app.command(epilog="Example: tandem config get disagg.policy")
def get(
    ctx: typer.Context,
    key: Key,
    config: ConfigFile = None,
    etcd_endpoints: EtcdEndpoints = None,
    namespace: Namespace = None,
) -> None:
    """Print a live key's value in the cluster, or its configured one where none is set."""
    from tandem.launch.config.live import get_value

    session = join_session(ctx, config, None, etcd_endpoints, namespace)
    get_value(session.load_for_cluster(), key)


@config_app.command(
    "set",
    epilog="Example: tandem config set disagg.max_local_prefill_length 512",
    context_settings={"ignore_unknown_options": True},  # -5 is a value, to be refused as one
)
def set_(
    ctx: typer.Context,
    key: Key,
    value: Annotated[str, typer.Argument(help="The new value.")],
    config: ConfigFile = None,
    etcd_endpoints: EtcdEndpoints = None,
    namespace: Namespace = None,
) -> None:
    """Change a live key in a running cluster; a bad value is refused and changes nothing."""
    from tandem.launch.config.live import set_value

    session = join_session(ctx, config, None, etcd_endpoints, namespace)
    set_value(session.load_for_cluster(), key, value)


@config_app.command(epilog="Example: tandem config unset disagg.max_local_prefill_length")
def unset(
    ctx: typer.Context,
    key: Key,
    config: ConfigFile = None,
    etcd_endpoints: EtcdEndpoints = None,
    namespace: Namespace = None,
) -> None:
    """Take a live value back: every worker returns to the one it was started with."""
    from tandem.launch.config.live import unset_value

    session = join_session(ctx, config, None, etcd_endpoints, namespace)
    unset_value(session.load_for_cluster(), key)


@config_app.command(epilog="Example: tandem config watch")
def watch(
    ctx: typer.Context,
    config: ConfigFile = None,
    etcd_endpoints: EtcdEndpoints = None,
    namespace: Namespace = None,
) -> None:
    """Print live values, and every change as it comes, until Ctrl-C."""
    from tandem.launch.config.live import watch_values

    session = join_session(ctx, config, None, etcd_endpoints, namespace)
    watch_values(session.load_for_cluster())
