"""The `tandem` command of a worker that loses its device: `losing_worker.py FOLDER ROLE ARGUMENTS`.

Every step fails once the file `lost` is in FOLDER.
"""

import sys
from pathlib import Path
from typing import Any

from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.step.outcome import DeviceLostError
from tandem.launch.cli.main import main

if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    launch = ModelRunner.launch

    def launch_or_fail(self: ModelRunner, *args: Any, **options: Any) -> Any:
        if (folder / "lost").exists():
            raise DeviceLostError("cpu is lost: CUDA error: an illegal memory access")
        return launch(self, *args, **options)

    ModelRunner.launch = launch_or_fail  # type: ignore[method-assign]
    main()
