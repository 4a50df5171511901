"""A quantized model, served: the answers of a cluster with the numbers that its codes stand for."""

from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, write_sensitive_model
from tests.engine.weights.quantizers import FORMS, quantize_model

PROMPTS = ("Hello!", "the fox ran over green hills and saw an old house " * 6)


async def answers(run_dir: Path, model: Path) -> list[str]:
    """Return the text to every prompt, prefilled by the decode worker and by another."""
    texts = []
    async with Cluster(run_dir, model) as cluster:
        await cluster.start_all()
        for place in ("local", "remote"):
            for prompt in PROMPTS:
                answer = await cluster.complete(
                    prompt,
                    max_tokens=40,
                    temperature=0,
                    cache_salt=place,
                    headers={"x-tandem-prefill": place},
                )
                assert (answer.status, answer.place) == (200, place)
                texts.append(answer.text)
    return texts


@pytest.mark.slow
async def test_codes_are_answered_as_their_numbers_are(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    write_sensitive_model(tmp_path / "numbers")
    quantize_model(tmp_path / "numbers", tmp_path / "codes", *FORMS["awq"])
    codes = await answers(tmp_path_factory.mktemp("codes"), tmp_path / "codes")
    assert codes[:2] == codes[2:] and all(codes)
    assert codes == await answers(tmp_path_factory.mktemp("numbers"), tmp_path / "numbers")
