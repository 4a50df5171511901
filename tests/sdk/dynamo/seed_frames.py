"""Programs of the guides that authors of workers learned from, made runnable.

The guides are not part of this repository. Their blocks are taken as printed; import lines go
through `tandem.sdk.dynamo.port`, and around a fragment stands the smallest frame that completes it.
"""

import os
import re
import textwrap
from pathlib import Path

from tandem.sdk.dynamo.port import port

ROOT = Path(__file__).resolve().parents[3]
MAIN = 'if __name__ == "__main__":'

# Blocks that are no programs, by seed and number of the block, and why.
NO_PROGRAMS = {
    ("000", 1): "two addresses, in words",
    ("000", 2): "two addresses, in words",
    ("002", 12): "two class lines over comments: not Python as printed",
    ("002", 13): "`await` in __init__ and lines that begin with a dot: not Python as printed",
    ("003", 0): "a drawing",
    ("003", 1): "a list of files",
    ("003", 2): "toml of a package",
    ("003", 3): "shell: builds Dynamo",
    ("003", 12): "shell: installs a package",
    ("003", 14): "shell: the same as test_the_engine_runs_as_a_process",
    ("003", 15): "shell: curl",
    ("003", 16): "shell: runs Dynamo's own sample engine",
}


def seeds() -> Path | None:
    """The folder with the guides: of TANDEM_SEEDS, else beside the checkout; None without."""
    folder = Path(os.environ.get("TANDEM_SEEDS") or ROOT.parent / "shared" / "seeds")
    return folder if folder.is_dir() else None


def text_of(seed: str) -> str:
    """One guide's text, by the three digits that its file begins with."""
    folder = seeds()
    assert folder is not None
    (path,) = folder.glob(f"{seed}_*.txt")
    return path.read_text()


def blocks(seed: str) -> list[str]:
    """The fenced blocks of a guide, in order, without their common indentation."""
    fence = re.compile(r"^( *)```\w*\n(.*?)^\1```\s*$", re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(found[2]) for found in fence.finditer(text_of(seed))]


def numbered_blocks(seed: str) -> list[str]:
    """Blocks whose lines carry numbers and have lost their indentation."""
    found: list[list[str]] = []
    current: list[str] = []
    for line in [*text_of(seed).splitlines(), ""]:
        number = str(len(current) + 1)
        if line.startswith(number) and (current or not line[1:2].isdigit()):
            current.append(line.removeprefix(number))
        else:
            if len(current) > 1:
                found.append(current)
            current = []
    return ["\n".join(lines) for lines in found]


def unfenced_program(seed: str) -> str:
    """The one program of a guide that was printed without fences."""
    text = text_of(seed)
    last = "asyncio.run(worker())\n"
    return text[text.index("from dynamo.llm import") : text.index(last) + len(last)]


def ported(source: str) -> str:
    """With import lines of ours; every import must have its place."""
    result = port(source)
    assert not result.unported, result.unported
    return result.source


# ---- frames -----------------------------------------------------------------------------------


def worker_program(printed: str) -> str:
    """A whole worker: three spaces too many on some lines go, and what it never imported comes."""
    aligned = re.sub(r"^ {3}(?=\S)", "", printed, flags=re.MULTILINE)
    return f"import asyncio\nimport uvloop\nengine = None\n{aligned}"


def handler(printed: str) -> str:
    """A RequestHandler that lacks its engine and the question whether the process is ending."""
    return (
        "yielded = 0\n"
        "def is_shutting_down():\n"
        "    return yielded == 2\n"
        "class Engine:\n"
        "    def generate_streaming(self, request):\n"
        "        global yielded\n"
        "        for yielded in range(request['count']):\n"
        "            yield {'token_ids': [yielded]}\n"
        f"{printed}\n"
        "RequestHandler.engine = Engine()\n"
    )


def skeleton(printed: str) -> str:
    """A service whose types stand elsewhere."""
    return (
        "from collections.abc import AsyncIterator\n"
        "from pydantic import BaseModel\n"
        "class RequestType(BaseModel):\n"
        "    text: str\n"
        "ResponseType = RequestType\n"
        f"{printed}"
    )


def chat_worker(printed: str) -> str:
    """A service without its decorator, over a request type of another package."""
    (theirs, body) = printed.split("\n", 1)
    assert theirs.startswith("from vllm.")
    return (
        "from dynamo.sdk import dynamo_endpoint, service\n"
        "from pydantic import BaseModel\n"
        "class ChatCompletionRequest(BaseModel):\n"
        "    model: str\n"
        f"{body}\n"
        'service(dynamo={"namespace": "your_namespace"})(YourLLMWorker)\n'
    )


def basic_worker(printed: str) -> str:
    """Lacks an import."""
    return f"import logging\n{printed}"


def router(starts: str, decides: str) -> str:
    """Two halves of one class, which lack imports, types and the arguments."""
    (_, methods) = starts.split("    # ...\n")
    return (
        "import random\n"
        "from collections.abc import AsyncIterator\n"
        "from types import SimpleNamespace\n"
        "from pydantic import BaseModel\n"
        "from dynamo.llm import AggregatedMetrics, KvIndexer, KvMetricsAggregator, OverlapScores\n"
        "from dynamo.sdk import async_on_start, dynamo_context, dynamo_endpoint, service\n"
        "WorkerId = str\n"
        "class Tokens(BaseModel):\n"
        "    tokens: list[int]\n"
        + decides.replace("    # ...\n", f"    args = SimpleNamespace(block_size=4)\n{methods}", 1)
    )


def connector(head: str, *methods: str) -> str:
    """One class from its printed parts, for memory of the host where there is no GPU."""
    without_usage = [method.split("# Example usage:")[0] for method in methods]
    body = textwrap.indent("\n".join(without_usage), "    ")
    return f"import uuid\nimport torch\n{head}\n{body}".replace('"VRAM"', '"DRAM"')


def resources(printed: str) -> str:
    """A decorator without a class."""
    return f"from dynamo.sdk import service\n{printed}\nclass Worker:\n    pass\n"


def io_worker(printed: str) -> str:
    """A method without a class, which lacks what it waits for."""
    return (
        "import asyncio\n"
        "from dynamo.sdk import dynamo_endpoint, service\n"
        '@service(dynamo={"namespace": "your_namespace"})\n'
        "class Worker:\n"
        "    async def some_async_operation(self):\n"
        "        await asyncio.sleep(0)\n"
        f"{textwrap.indent(printed, '    ')}\n"
        "        return {'result': result}\n"
    )


def engine_module(head: str, *methods: str) -> str:
    """The class of the unified guide from its parts; the engine inside counts."""
    return (
        f"{head}\n"
        + textwrap.indent("\n".join(methods), "    ")
        + "\n    async def _next_token(self, prompt_tokens):\n"
        + "        await asyncio.sleep(0)\n"
        + "        return 7\n"
        + "class Inside:\n"
        + "    async def cancel(self, request_id):\n"
        + "        pass\n"
        + "    async def shutdown(self):\n"
        + "        pass\n"
        + "async def heavy_init(model_name):\n"
        + "    return Inside()\n"
    )


def refusing_handler(printed: str) -> str:
    """A method alone."""
    (theirs, method) = printed.split("\n", 1)
    return f"{theirs}\nclass Handler:\n{textwrap.indent(method, '    ')}"
