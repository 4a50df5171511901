"""`tandem config`: show, get, set, unset, watch."""

from typing import Annotated

import typer

from tandem.config.session import Session
from tandem.launch.cli.options import Json, cluster_session, shares

config_app = typer.Typer(
    help="Show the configuration, and change live keys of a running cluster.", no_args_is_help=True
)

Key = Annotated[str, typer.Argument(help="A live key, such as disagg.max_local_prefill_length.")]
Model = Annotated[
    str, typer.Option(help="Only for this model: its own value goes before that of all models.")
]


@config_app.command(epilog="Example: tandem config show --disagg.policy=threshold --json")
@shares(session=cluster_session)
def show(
    session: Session,
    live: Annotated[
        bool | None,
        typer.Option(
            "--live/--no-live",
            help="With the cluster's live values; by default where one is named or runs here.",
        ),
    ] = None,
    as_json: Json = False,
    model: Annotated[str, typer.Option(help="With the live values of this model.")] = "",
) -> None:
    """Print every effective value and its origin."""
    from tandem.config.commands import show_config

    effective = session.load_for_cluster() if live is not False else session.load()
    show_config(effective, live=live, as_json=as_json, model=model)


@config_app.command(epilog="Example: tandem config get disagg.policy")
@shares(session=cluster_session)
def get(session: Session, key: Key, model: Model = "") -> None:
    """Print a live key's value in the cluster, or its configured value where none is set."""
    from tandem.config.commands import get_value

    get_value(session.load_for_cluster(), key, model)


@config_app.command(
    "set",
    epilog="Example: tandem config set disagg.max_local_prefill_length 512",
    context_settings={"ignore_unknown_options": True},  # -5 is a value, to be refused as one
)
@shares(session=cluster_session)
def set_(
    session: Session,
    key: Key,
    value: Annotated[str, typer.Argument(help="The new value.")],
    model: Model = "",
) -> None:
    """Change a live key in a running cluster; a bad value is refused and changes nothing."""
    from tandem.config.commands import set_value

    set_value(session.load_for_cluster(), key, value, model)


@config_app.command(epilog="Example: tandem config unset disagg.max_local_prefill_length")
@shares(session=cluster_session)
def unset(session: Session, key: Key, model: Model = "") -> None:
    """Remove a live value: every worker returns to the value it was started with."""
    from tandem.config.commands import unset_value

    unset_value(session.load_for_cluster(), key, model)


@config_app.command(epilog="Example: tandem config watch")
@shares(session=cluster_session)
def watch(session: Session) -> None:
    """Print live values, and every change at once, until Ctrl-C."""
    from tandem.config.commands import watch_values

    watch_values(session.load_for_cluster())
