import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

NIXL = "from tandem.transfer.nixl import NixlTransport as Transport"
SDK = "from tandem.sdk.nixl.agent import nixl_agent as Transport"
UCXX = "from tandem.transfer.ucx.transport import UcxTransport as Transport"


@pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed (the extra 'ucx')")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(NIXL, UCXX, id="nixl-ucxx"),
        pytest.param(SDK, UCXX, id="sdk-ucxx", marks=pytest.mark.slow),
        pytest.param(UCXX, NIXL, id="ucxx-nixl"),
        pytest.param(UCXX, SDK, id="ucxx-sdk", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_loaded_one_library_refuses_the_other(first: str, second: str) -> None:
    code = f"""
from tandem.runtime.errors import TransferError
{first}
loaded = Transport("first")
{second}
try:
    Transport("second")
except TransferError as error:
    assert "separate processes" in error.message
else:
    raise AssertionError("the process has two copies of UCX")
loaded.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


_SETTINGS = ("UCX_CUDA_IPC_CACHE", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY")
_RECORDS_THE_ENVIRONMENT = "import os; seen = {name: os.environ.get(name) for name in %r}"


@pytest.mark.parametrize(
    ("given", "has_driver", "seen"),
    [
        pytest.param({}, True, ["n", "on"], id="defaults"),
        pytest.param({"UCX_CUDA_IPC_CACHE": "y"}, True, ["y", "on"], id="the user's value stays"),
        pytest.param({}, False, [None, None], id="no GPU, and UCX would warn of them"),
    ],
)
def test_ucx_finds_the_settings_for_gpu_memory_when_it_is_loaded(
    given: dict[str, str],
    has_driver: bool,
    seen: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    package = tmp_path / "nixl_cu13"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_api.py").write_text(_RECORDS_THE_ENVIRONMENT % (_SETTINGS,))
    for name in _SETTINGS:
        monkeypatch.delenv(name, raising=False)
    code = f"""
import json
from tandem.transfer import libraries
libraries.has_cuda_driver = lambda: {has_driver}
from tandem.transfer.nixl import load_api
print(json.dumps(load_api().seen))
"""
    environ = {**os.environ, **given, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, check=True, timeout=60, env=environ, stdout=subprocess.PIPE)
    assert json.loads(run.stdout) == dict(zip(_SETTINGS, seen, strict=True))
