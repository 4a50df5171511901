"""Options of the commands that run roles, as the parts that run them take them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model to serve, and its name."""

    model: Annotated[str, typer.Argument(help="A model folder, a hub id, or `bundled`.")] = (
        "bundled"
    )
    served_model_name: Annotated[
        str | None,
        typer.Option(help="The name in requests; by default the folder's name or the hub id."),
    ] = None


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Options of the commands that start several processes."""

    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for logs; a new temporary one by default.")
    ] = None
    is_verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the logs of all processes.")
    ] = False
    start_timeout_s: Annotated[float, typer.Option(help="Longest time to become ready (s).")] = 600
