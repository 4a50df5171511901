"""The GPUs and cores of a worker on a real Slurm, whose nodes have two threads on each core."""

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tandem.launch.slurm.deployment import JobOptions
from tandem.launch.slurm.scripts import WORKER, render
from tests.launch.slurm.slurm_cluster import SlurmCluster
from tests.launch.slurm.unsubmitted import deployment_in
from tests.services import eventually

pytestmark = pytest.mark.slow
NUM_HOSTS, NODE = 1, {"num_cpus": 4, "has_gpus": True}

PROGRAM = (
    "import os, time; print('GPU', os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(600)"
)


def script_in(folder: Path, num_cpus: int) -> Path:
    deployment = msgspec.structs.replace(
        deployment_in(folder, sys.executable, "-c", PROGRAM),
        worker=JobOptions(gpus=1, cpus=num_cpus),
    )
    path = folder / WORKER
    path.write_text(render(deployment)[WORKER])
    return path


async def test_each_worker_of_a_node_has_a_gpu_of_its_own(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    script = script_in(tmp_path / "state", 2)
    slurm.run("sbatch", "--array=0-2", str(script))

    def seen() -> set[str]:
        logs = [path.read_text() for path in (script.parent / "logs").glob("*.log")]
        return {line for text in logs for line in text.splitlines() if line.startswith("GPU")}

    try:
        await eventually(lambda: seen() == {"GPU 0", "GPU 1"})
        await eventually(lambda: slurm.run("squeue", "-h", "-t", "PD", "-o", "%r") == "Resources\n")
    finally:
        slurm.end_jobs()


@pytest.mark.parametrize(("num_cpus", "fits"), [(4, True), (5, False)])
def test_a_core_of_two_threads_is_one_core(
    slurm: SlurmCluster, tmp_path: Path, num_cpus: int, fits: bool
) -> None:
    sbatch = shutil.which("sbatch")
    assert sbatch is not None
    done = subprocess.run(
        [sbatch, "--test-only", str(script_in(tmp_path / "state", num_cpus))],
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ("to start at" in done.stderr) == fits, done.stderr
