"""The program in docs/engines.md is an engine."""

from pathlib import Path

from tandem.runtime.config import RuntimeConfig
from tandem.sdk.conformance.kit import run_conformance
from tests.programs import of_guide
from tests.sdk.engine.engine_stack import answer_of, client_of, serving


async def test_the_guides_engine_serves_and_conforms(tmp_path: Path, quick: RuntimeConfig) -> None:
    engine_class = of_guide("engines.md", "class MyEngine", tmp_path).MyEngine
    await run_conformance(engine_class)
    engine, config = await engine_class.from_args(["--name", "n"])
    async with serving(engine, config, quick) as worker, client_of(worker) as client:
        request = {"token_ids": [4, 5], "stop_conditions": {"max_tokens": 3}}
        generated = [
            each for chunk in await answer_of(client, request) for each in chunk["token_ids"]
        ]
        assert generated == [5, 5, 5]
