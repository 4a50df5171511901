"""Import lines of workers and engines for Dynamo, changed to ours by the table of the docs."""

import importlib
from pathlib import Path

import pytest

from tandem.sdk.dynamo.imports import MODULES, TABLE, Names, markdown
from tandem.sdk.dynamo.port import Unported, main, port

DOCS = Path(__file__).resolve().parents[3] / "docs" / "from-dynamo.md"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.module}:{row.names[0]}")
def test_every_name_of_the_table_exists_or_has_an_alternative(row: Names) -> None:

    if row.ours is None:
        assert row.note.endswith(".")
    else:
        module = importlib.import_module(row.ours)
        assert [name for name in row.names if not hasattr(module, name)] == []


def test_every_module_of_the_table_exists() -> None:
    for ours in MODULES.values():
        assert importlib.import_module(ours)


def test_the_guide_prints_the_table() -> None:
    assert markdown() in DOCS.read_text()


def test_only_import_lines_change() -> None:
    source = (
        "import asyncio\n"
        "from dynamo.llm import (\n"
        "    ModelInput as Input,\n"
        "    register_llm,\n"
        ")\n"
        'text = "from dynamo.llm import ModelInput"  # stays\n'
        "async def start():\n"
        "    from dynamo.runtime import Client, dynamo_worker  # noqa: E402\n"
        "    return Client\n"
    )
    assert port(source).source == (
        "import asyncio\n"
        "from tandem.sdk import ModelInput as Input, register_llm\n"
        'text = "from dynamo.llm import ModelInput"  # stays\n'
        "async def start():\n"
        "    from tandem.sdk import Client, dynamo_worker  # noqa: E402\n"
        "    return Client\n"
    )


def test_names_of_one_line_can_go_to_different_modules() -> None:
    source = "if True:\n    from dynamo.common.backend import telemetry, LLMEngine\n"
    assert port(source).source == (
        "if True:\n"
        "    from tandem.sdk.worker import telemetry\n"
        "    from tandem.sdk import LLMEngine\n"
    )
    source = "from nixl._api import nixl_agent\nimport dynamo.llm.exceptions as errors\n"
    assert port(source).source == (
        "from tandem.sdk.nixl import nixl_agent\nimport tandem.sdk.exceptions as errors\n"
    )


def test_relative_imports_are_changed_if_their_package_is_given() -> None:
    source = "from . import telemetry as t\nfrom .run import run\nfrom ..constants import X\n"
    assert port(source).source == source
    ported = port(source, "dynamo.common.backend")
    assert ported.source == (
        "from tandem.sdk.worker import telemetry as t\n"
        "from tandem.sdk.engine_worker.run import run\n"
        "from ..constants import X\n"
    )
    assert [each.module for each in ported.unported] == ["dynamo.common.constants"]


def test_a_name_that_tandem_does_not_have_is_kept_and_reported() -> None:
    ported = port("from dynamo.llm import HttpKitten, KvRouter, ModelType\n")
    assert ported.source == (
        "from tandem.sdk import ModelType\nfrom dynamo.llm import HttpKitten, KvRouter\n"
    )
    kitten, router = ported.unported
    assert kitten == Unported(1, "dynamo.llm", "HttpKitten", "it is not in the table")
    assert "KvIndexer" in router.note
    assert port("import dynamo.llm\n").unported[0].name == "*"


def test_the_command_shows_the_difference_and_writes_it_with_a_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "engine.py"
    path.write_text("from dynamo.llm import ModelType\n")
    assert main([str(path)]) == 0
    assert "+from tandem.sdk import ModelType\n" in capsys.readouterr().out
    assert path.read_text() == "from dynamo.llm import ModelType\n"
    assert main(["--write", str(path)]) == 0
    assert path.read_text() == "from tandem.sdk import ModelType\n"


def test_the_command_lists_the_names_left_to_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "engine.py"
    path.write_text("from dynamo.llm import KvRouter\n")
    broken = tmp_path / "broken.py"
    broken.write_text("import (\n")
    assert main([str(path), str(broken)]) == 1
    told = capsys.readouterr().err
    assert "engine.py: line 1: dynamo.llm.KvRouter: The frontend routes" in told
    assert "broken.py: " in told
