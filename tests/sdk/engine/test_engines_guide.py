"""The program in docs/engines.md is an engine."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from tandem.runtime.config import RuntimeConfig
from tandem.sdk.conformance.kit import run_conformance
from tests.sdk.engine.engine_stack import answer_of, client_of, serving

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "engines.md"


def guide(folder: Path) -> ModuleType:
    block = re.search(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert block is not None
    path = folder / "my_engine.py"
    path.write_text(block[1])
    spec = importlib.util.spec_from_file_location("my_engine", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_the_guides_engine_serves_and_conforms(
    tmp_path: Path, runtime_config: RuntimeConfig
) -> None:
    engine_class = guide(tmp_path).MyEngine
    await run_conformance(engine_class)
    engine, config = await engine_class.from_args(["--name", "n"])
    quick = runtime_config.model_copy(update={"drain_timeout_s": 0.8})
    async with serving(engine, config, quick) as worker, client_of(worker) as client:
        request = {"token_ids": [4, 5], "stop_conditions": {"max_tokens": 3}}
        generated = [
            each for chunk in await answer_of(client, request) for each in chunk["token_ids"]
        ]
        assert generated == [5, 5, 5]
