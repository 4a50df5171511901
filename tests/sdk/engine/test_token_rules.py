"""Allowed tokens and bad words on their way to an engine of the kit that takes them."""

from typing import Any

from tandem.frontend.catalog.catalog import TokenModel
from tandem.runtime.config import RuntimeConfig
from tandem.sdk.engine.types import EngineConfig
from tests.sdk.engine.engine_stack import ToyEngine, config_of
from tests.sdk.worker.model_stack import with_engine


class Ruled(ToyEngine):
    """An engine that says that it takes the rules, or does not."""

    def __init__(self, *, supports: bool) -> None:
        super().__init__()
        self._supports = supports

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(
            "tandem-tiny", served_model_name="toy", supports_token_rules=self._supports
        )


async def test_an_engine_that_takes_them_gets_tokens(runtime_config: RuntimeConfig) -> None:
    body: dict[str, Any] = {
        "model": "toy", "prompt": "a", "allowed_token_ids": [1, 2], "bad_words": ["cat"],
    }  # fmt: skip
    engine = Ruled(supports=True)
    async with with_engine(engine, config_of(), runtime_config) as stack:
        [model] = stack.server.catalog.models
        assert isinstance(model, TokenModel) and model.card.supports_token_rules
        assert (await stack.http.post("/v1/completions", json=body)).status_code == 200
        sampling = engine.requests[-1]["sampling_options"]
        assert sampling["allowed_token_ids"] == [1, 2]
        assert [model.text.decode(word) for word in sampling["bad_words"]] == ["cat", " cat"]


async def test_one_that_does_not_is_not_asked(runtime_config: RuntimeConfig) -> None:
    engine = Ruled(supports=False)
    async with with_engine(engine, config_of(), runtime_config) as stack:
        for field, value in (("allowed_token_ids", [1]), ("bad_words", ["cat"])):
            body = {"model": "toy", "prompt": "a", field: value}
            refused = await stack.http.post("/v1/completions", json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == field
    assert not engine.requests
