import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import psutil
import pytest

from tandem.launch.cli.main import main
from tandem.runtime.config import RuntimeConfig

GONE_TIMEOUT_S = 60.0

Tandem = Callable[..., tuple[int, str, str]]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def wait_until_gone() -> Callable[[Sequence[int]], None]:
    """Fails when one of the processes is still there after a while."""

    def wait(pids: Sequence[int]) -> None:
        deadline_s = time.perf_counter() + GONE_TIMEOUT_S
        while left := [pid for pid in pids if is_running(pid)]:
            assert time.perf_counter() < deadline_s, f"still running: {left}"
            time.sleep(0.01)

    return wait


@pytest.fixture
def tandem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: object
) -> Iterator[Tandem]:
    """Runs the command in this process: (exit code, standard output, standard error)."""
    threshold = gc.get_threshold()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        output = capsys.readouterr()
        return int(code or 0), output.out, output.err

    yield run
    gc.set_threshold(*threshold)


@pytest.fixture
def joined(runtime_config: RuntimeConfig) -> list[str]:
    """Options that join a cluster of the test's own."""
    return [
        *("--etcd-endpoints", runtime_config.etcd_endpoints),
        *("--namespace", runtime_config.namespace),
    ]
