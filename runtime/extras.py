"""Optional packages: the commands that install them."""

import shlex
from importlib import metadata

_PACKAGE = "tandem-serve"


def install_command(extra: str) -> str:
    """Return the command for an extra of Tandem.

    It names the packages of the extra, as Tandem itself may be on no registry.
    """
    needed: list[str] = []
    for requirement in metadata.requires(_PACKAGE) or ():
        package, _, marker = requirement.partition(";")
        if f"extra == '{extra}'" in marker.replace('"', "'"):
            needed.append(package.strip())
    assert needed, f"no extra {extra!r}"
    return f"pip install {shlex.join(needed)}"
