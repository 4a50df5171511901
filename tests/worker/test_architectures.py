"""Each native architecture over a handoff: the tokens of a prompt that is computed at home."""

import shutil
from pathlib import Path

import pytest

from tandem.runtime.config import RuntimeConfig
from tests.engine.tiny_models import DENSE, MIXTURES, make_model
from tests.handoff_peer import FREE_WRITES, MODEL
from tests.worker.pair import Pair

NUM_TOKENS = 24


@pytest.mark.slow
@pytest.mark.parametrize("model_type", DENSE | MIXTURES)
async def test_a_remote_prefill_gives_the_tokens_of_a_local_one(
    runtime_config: RuntimeConfig, tiny_model: Path, tmp_path: Path, model_type: str
) -> None:
    """Over NATS and NIXL, for prompts on both sides of a window and of a block's end.

    Their KV goes layer by layer, or all of it at once.
    """
    make_model(tmp_path, model_type, **(DENSE | MIXTURES)[model_type])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, tmp_path)
    tokens: set[int] = set()
    async with Pair(runtime_config, tmp_path) as pair:
        link = pair.two.worker.group.links[pair.one.node.instance_id]
        num_writes = pair.two.prefill.metrics._writes.labels(MODEL, "completed")._value
        for length, by_layers in ((9, True), (24, False), (61, True)):
            link.rates = FREE_WRITES if by_layers else None
            num_before = num_writes.get()
            prompt = [5 + 7 * length * index % 500 for index in range(length)]
            answer = await pair.ask(pair.one, prompt, num_tokens=NUM_TOKENS, place="remote")
            text = await answer.whole()
            assert answer.report is not None and answer.report.place == "remote"
            assert text.token_ids == pair.undisturbed(prompt, NUM_TOKENS).token_ids
            assert len(text.token_ids) == NUM_TOKENS
            assert (num_writes.get() > num_before + 1) == by_layers
            tokens |= set(text.token_ids)
        await pair.balanced()
    assert len(tokens) > 3
