"""What a worker's process is prepared with before its libraries are loaded."""

import os
import subprocess
import sys

import pytest

from tandem.launch.cli.options import ModelOptions
from tandem.launch.config.model import load_config
from tandem.launch.roles import SPIN_COUNT, prepare_worker


def test_compute_threads_wait_briefly_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    prepare_worker(load_config(), ModelOptions(), None)
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    prepare_worker(load_config(), ModelOptions(), None)
    assert os.environ["GOMP_SPINCOUNT"] == str(SPIN_COUNT)


def test_pytorch_is_not_loaded_before_that() -> None:
    script = "import sys, tandem.launch.roles; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, check=True)
    assert done.stdout.strip() == b"False"
