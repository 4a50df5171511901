import gc
import json
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.launch.conftest import Tandem

COMMANDS = ["serve", "run", "frontend", "prefill", "decode", "status", "plan", "doctor"]
CONFIG_COMMANDS = ["show", "get", "set", "unset", "watch"]


def test_help_loads_neither_torch_nor_the_rooms() -> None:
    script = (
        "import sys; from tandem.launch.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'pydantic', 'grpc', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "serve" in done.stdout


@pytest.mark.parametrize(
    "command", [[c] for c in COMMANDS] + [["config", c] for c in CONFIG_COMMANDS]
)
def test_every_command_has_help_with_an_example(tandem: Tandem, command: list[str]) -> None:
    code, output, _ = tandem(*command, "--help")
    assert code == 0
    assert "Example: tandem" in output
    assert " ".join(command) in output


def test_garbage_is_seldom_looked_for_while_a_command_imports(tandem: Tandem) -> None:
    tandem("--version")
    assert gc.get_threshold()[0] >= 50_000


def test_the_version_is_that_of_the_package(tandem: Tandem) -> None:
    assert tandem("--version")[:2] == (0, f"tandem {version('tandem-serve')}\n")


@pytest.mark.parametrize("command", ["bench", "conformance", "engine"])
def test_what_another_parser_reads_is_passed_on(tandem: Tandem, command: str) -> None:
    code, output, _ = tandem(command, "--help")
    assert code == 0
    assert f"tandem {command}" in output


def test_engine_wants_an_engine(tandem: Tandem) -> None:
    code, _, errors = tandem("engine", "tandem.runtime.errors:TandemError", "--some.flag")
    assert code == 2
    assert "TandemError is no engine: it must be a subclass of LLMEngine" in errors


def test_config_show_prints_values_and_origins(tandem: Tandem, tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("engine:\n  block_size: 32\n")
    code, output, _ = tandem(
        *("config", "show", "--no-live", "--json", "--config", str(file)),
        *("--disagg.policy", "threshold", "--runtime.cluster_token=hush"),
    )
    values = json.loads(output)
    assert code == 0
    assert values["engine.block_size"] == {"value": 32, "origin": f"{file}:2"}
    assert values["disagg.policy"] == {"value": "threshold", "origin": "flag --disagg.policy"}
    assert values["disagg.max_prefill_queue_size"] == {"value": 2, "origin": "default"}
    assert values["runtime.cluster_token"]["value"] == "***"
    assert "hush" not in output


def test_config_show_has_one_line_per_key(tandem: Tandem) -> None:
    _, output, _ = tandem("config", "show", "--no-live")
    assert re.search(r"^disagg\.max_local_prefill_length +1000 +default *$", output, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["config", "show", "--disagg.polcy=x"], 2, "did you mean disagg.policy"),
        (["config", "show", "--disagg.policy"], 2, "--disagg.policy needs a value"),
        (
            ["serve", "--topology", "disagg-1p2d"],
            2,
            "'disagg-1p2d' is neither a topology nor a file; did you mean",
        ),
        (["serve", "no/such/model", "--port", "0"], 1, "no model 'no/such/model'"),
        (["serve", "--config", "/no/such/file"], 2, "cannot read /no/such/file"),
        (["prefill", "--gpu", "99"], 2, "--gpu cpu"),
        (["decode", "--gpu", "fast"], 2, "must be an index, cpu or auto"),
        (["decode", "--engine.device=cuda:99"], 2, "this machine has"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    tandem: Tandem, arguments: list[str], code: int, reason: str
) -> None:
    found, _, errors = tandem(*arguments)
    line = errors.strip().splitlines()[-1]
    assert found == code
    assert line.startswith("error: ")
    assert reason in line
    assert "Traceback" not in errors


def test_a_run_folder_that_others_can_write_to_is_refused(tandem: Tandem, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    code, _, errors = tandem("serve", "--port", "0", "--run-dir", str(shared))
    assert code == 2
    assert f"error: --run-dir {shared}: can be written to by other users" in errors


@pytest.mark.parametrize("option", ["--port", "--http-port"])
@pytest.mark.parametrize("command", ["serve", "frontend"])
def test_a_taken_port_is_refused_with_a_free_one(tandem: Tandem, command: str, option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        code, _, errors = tandem(command, option, str(port))
    assert code == 2
    assert re.search(rf"port {port} on 127.0.0.1 is taken; \d+ is free: --port \d+", errors)


def test_a_mistyped_option_names_the_right_one(tandem: Tandem) -> None:
    code, _, errors = tandem("serve", "--prot", "1")
    assert code == 2
    assert "--port" in errors
