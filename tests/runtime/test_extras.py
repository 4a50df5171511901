"""Optional packages, whose commands work while Tandem itself is on no registry."""

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tandem.runtime.extras import install_command

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - {"dev"}))
def test_the_command_of_an_extra_names_its_packages(extra: str) -> None:
    packages = [each.partition(";")[0].partition(">")[0] for each in EXTRAS[extra]]
    pip, install, *named = shlex.split(install_command(extra))
    assert (pip, install) == ("pip", "install")
    assert len(named) == len(packages)
    assert all(name.startswith(package) for name, package in zip(named, packages, strict=True))
    assert f"| `{extra}` |" in (ROOT / "docs" / "deployment.md").read_text()


def test_no_page_and_no_message_installs_tandem_by_its_bare_name() -> None:
    folders = [each for each in ROOT.iterdir() if each.is_dir() and each.name.isalpha()]
    found = [
        path
        for folder in folders
        if folder.name not in ("build", "tests")
        for path in [*folder.rglob("*.md"), *folder.rglob("*.py"), ROOT / "README.md"]
        if any(
            f"install {quote}tandem-serve" in text and "@ git+" not in text
            for text in path.read_text().splitlines()
            for quote in ("", "'", '"')
        )
    ]
    assert found == []


def test_a_process_loads_no_websockets_of_nats_and_may_load_aiohttp_itself() -> None:
    code = (
        "import sys, tandem.launch.cli.main, tandem.frontend.serving.server\n"
        "assert 'nats.aio.transport' in sys.modules and 'aiohttp' not in sys.modules\n"
        "import aiohttp"
    )
    subprocess.run([sys.executable, "-c", code], timeout=100, check=True)
