import subprocess
import sys
from importlib.util import find_spec

import pytest

NIXL = "from tandem.transfer.nixl import NixlTransport as Transport"
SDK = "from tandem.sdk.nixl.agent import nixl_agent as Transport"
UCXX = "from tandem.transfer.ucx.transport import UcxTransport as Transport"


@pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed (the extra 'ucx')")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(NIXL, UCXX, id="nixl-ucxx"),
        pytest.param(SDK, UCXX, id="sdk-ucxx"),
        pytest.param(UCXX, NIXL, id="ucxx-nixl"),
        pytest.param(UCXX, SDK, id="ucxx-sdk"),
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
