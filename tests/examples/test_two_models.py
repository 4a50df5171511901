"""examples/two_models, run as its docstring says."""

import aiohttp
import pytest
from tokenizers import Tokenizer

from tandem.models.paths import BUNDLED_MODEL
from tandem.sdk.sample_engine import expected_tokens
from tests.examples.example_cluster import ExampleCluster


@pytest.mark.slow
async def test_two_models_are_served_by_two_processes_and_by_the_one_that_is_left(
    examples: ExampleCluster, http: aiohttp.ClientSession
) -> None:
    examples.environment["TANDEM_RUNTIME__LEASE_TTL_S"] = "5"  # the killed process leaves this soon
    examples.start_frontend()
    first, second = (examples.start("two_models", "two_models.py") for _ in range(2))
    await examples.wait_for_models(http, "quick", "slow")
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))

    async def check(model: str, prompt: str) -> None:
        answer = await examples.complete(http, model=model, prompt=prompt, max_tokens=5)
        prompt_ids = tokenizer.encode(prompt).ids
        assert answer["model"] == model
        assert answer["choices"][0]["text"] == tokenizer.decode(expected_tokens(prompt_ids, 5))
        assert answer["usage"]["completion_tokens"] == 5

    for model in ("quick", "slow"):
        for prompt in ("Once upon a time", "a b c"):
            await check(model, prompt)
    first.kill()
    for model in ("quick", "slow", "quick", "slow"):
        await check(model, "and they lived")
    chat = await examples.complete(
        http,
        "chat/completions",
        model="quick",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=3,
    )
    assert chat["choices"][0]["finish_reason"] == "length"
    assert second.end() == 0
    await examples.wait_for_models(http)
