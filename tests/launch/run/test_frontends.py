"""A frontend starts by itself, without the parts of a worker."""

import subprocess
import sys


def test_a_frontend_loads_nothing_of_the_engine_and_no_progress_bars() -> None:
    script = "import sys, tandem.launch.run.frontends; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, check=True)
    loaded = done.stdout.decode().split()
    assert "tandem.frontend.serving.server" in loaded
    needless = ("tandem.engine.", "tandem.models", "tandem.emulation", "torch", "rich")
    assert [each for each in loaded if each.startswith(needless)] == ["tandem.engine.config"]
