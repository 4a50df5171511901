"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from tandem.launch.cli.arguments import Session

Model = Annotated[str, typer.Argument(help="A model folder, a hub id, or `bundled`.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file of config sections.")
]
Gpu = Annotated[str | None, typer.Option(help="GPU index, `cpu` or `auto`; by default auto.")]
NatsUrl = Annotated[str | None, typer.Option(help="NATS to join, as in nats://10.0.0.1:4222.")]
EtcdEndpoints = Annotated[
    str | None,
    typer.Option(help="etcd to join, as in http://10.0.0.1:2379; commas between several."),
]
Namespace = Annotated[str | None, typer.Option(help="Separates clusters that share NATS and etcd.")]
ServedName = Annotated[
    str | None, typer.Option(help="The name clients ask for; the folder's name by default.")
]
Host = Annotated[str | None, typer.Option(help="Address to listen on; by default 127.0.0.1.")]
Port = Annotated[
    int | None, typer.Option("--port", "-p", help="Port to listen on; by default 8000.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def join_session(
    ctx: typer.Context,
    config: Path | None,
    nats_url: str | None = None,
    etcd_endpoints: str | None = None,
    namespace: str | None = None,
) -> Session:
    """The session of this call, with the file and the cluster's addresses in it."""
    session = ctx.find_object(Session)
    assert session is not None, "main() passes one"
    session.file = config
    session.set("runtime.nats_url", nats_url, "--nats-url")
    session.set("runtime.etcd_endpoints", etcd_endpoints, "--etcd-endpoints")
    session.set("runtime.namespace", namespace, "--namespace")
    return session
