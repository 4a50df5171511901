"""Claude Code and Codex, unmodified and offline, read a file with a tool of theirs."""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.frontend_stack import MODEL, Stack, answer_with, prompt_of
from tests.frontend.grammar_worker import GrammarWorker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="the packages named here are Linux's"),
]
CLAUDE, CODEX = "@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.169.0"
INSTALL_TIMEOUT_S, RUN_TIMEOUT_S = 100.0, 60.0
QUESTION, WORD = "Which word is in note.txt?", "umbrella-77"


class RoomyWorker(GrammarWorker):
    """A worker whose model's context holds the instructions of such an agent."""

    length = 2**18


WORKER = RoomyWorker


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Home and working folder of the agent."""
    (tmp_path / "note.txt").write_text(f"The word is {WORD}.\n")
    return tmp_path


@pytest.fixture
def packages() -> Iterator[Path]:
    """A folder for packages, which are too large to be left behind."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


async def run(folder: Path, *command: str | Path, **environment: str) -> str:
    """Return the output of a program that must succeed, and is ended after its time."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder)} | environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(RUN_TIMEOUT_S):
            output, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def install(package: str, folder: Path) -> Path:
    """Return the folder of an installed package's modules. No script of the package runs."""
    npm = await asyncio.create_subprocess_exec(
        "npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", package,
        cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(INSTALL_TIMEOUT_S):
        output, _ = await npm.communicate()
    if npm.returncode:
        pytest.skip(f"{package} cannot be installed: {output.decode()[-300:]}")
    return folder / "node_modules"


def call(stack: Stack, tool: str, arguments: Mapping[str, str]) -> Sequence[str]:
    """Let the model call a tool until the word is in its prompt; return the prompts, live."""
    prompts: list[str] = []

    async def script(*request: Any) -> None:
        prompts.append(prompt_of(stack.worker.requests[-1]))
        text = f"It is {WORD}."
        if WORD not in prompts[-1]:
            body = json.dumps({"name": tool, "arguments": arguments})
            text = f"I look.<tool_call>\n{body}\n</tool_call>"
        if prompts[-1].endswith("<think>\n"):
            text = f"Let me see.</think>{text}"
        await answer_with(text)(*request)

    stack.worker.script = script
    return prompts


async def test_claude_code_runs_its_tool(stack: Stack, folder: Path, packages: Path) -> None:
    modules = await install(CLAUDE, packages)
    [program] = modules.glob("@anthropic-ai/claude-code-linux-*/claude")
    prompts = call(stack, "Read", {"file_path": str(folder / "note.txt")})
    output = await run(
        *(folder, program, "-p", QUESTION, "--model", MODEL),
        *("--allowedTools", "Read", "--output-format", "json"),
        ANTHROPIC_BASE_URL=stack.url,
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    result = json.loads(output)
    assert (result["result"], result["num_turns"]) == (f"It is {WORD}.", 2), result
    assert len(prompts) == 2 and QUESTION in prompts[0]


async def test_codex_runs_its_tool(stack: Stack, folder: Path, packages: Path) -> None:
    modules = await install(CODEX, packages)
    prompts = call(stack, "exec_command", {"cmd": "cat note.txt"})
    provider = f'{{name="tandem",base_url="{stack.url}/v1",wire_api="responses"}}'
    output = await run(
        *(folder, modules / ".bin" / "codex", "exec", "--skip-git-repo-check", "-m", MODEL),
        "--dangerously-bypass-approvals-and-sandbox",
        *("-c", "model_provider=tandem", "-c", f"model_providers.tandem={provider}"),
        QUESTION,
    )
    assert output.rstrip().endswith(f"It is {WORD}."), output
    assert len(prompts) == 2 and QUESTION in prompts[0]
