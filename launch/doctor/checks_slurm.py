"""Doctor's check of Slurm, on a host that has its config: for `tandem slurm`."""

import os
from collections.abc import Iterator
from pathlib import Path

from tandem.launch.supervise.slurm_commands import controller_host, run_command
from tandem.runtime.errors import ServiceError
from tandem.runtime.local.findings import Finding, ok, warn

CONFIG = Path("/etc/slurm/slurm.conf")


def check_slurm() -> Iterator[Finding]:
    """Yield the state of Slurm's controller and nodes; nothing where Slurm has no config."""
    config = Path(os.environ.get("SLURM_CONF", CONFIG))
    if not config.is_file():
        return
    try:
        controller = controller_host()
        nodes = [
            run_command("sinfo", "-h", "-N", "-o", "%N", *only) for only in ((), ("-t", "idle"))
        ]
    except ServiceError as error:
        yield warn("slurm", error.message, f"see {config}; `tandem slurm` cannot submit from here")
        return
    num_nodes, num_idle = (len(set(names.split())) for names in nodes)
    detail = f"slurmctld on {controller} answers; {num_idle} of {num_nodes} nodes are idle"
    yield ok("slurm", detail) if num_nodes else warn("slurm", detail, "`sinfo -R` says why")
