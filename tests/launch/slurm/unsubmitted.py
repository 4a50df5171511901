"""A deployment whose state folder is there, and whose jobs nobody has submitted."""

import sys
from pathlib import Path

from tandem.launch.slurm.deployment import Deployment, JobOptions

NO_OPTIONS = JobOptions()


def deployment_in(folder: Path, *launch: str, requeues: int = 3) -> Deployment:
    for part in ("logs", "workers"):
        (folder / part).mkdir(parents=True)
    (folder / "secrets").write_text("export TANDEM_RUNTIME__CLUSTER_TOKEN='a b'\n")
    (folder / "services.json").write_text("{}")
    return Deployment(
        name="tandem",
        folder=str(folder),
        launch=launch or (sys.executable, "-m", "tandem.launch"),
        model="/models/with space",
        model_name=None,
        role="both",
        interface="ib0",
        num_workers=2,
        num_spare=0,
        service=NO_OPTIONS,
        worker=JobOptions("gpu", "24:00:00", 2, 4, ("--account=x y",)),
        notice_s=90,
        max_requeues=requeues,
    )
