"""register_llm: a model at the frontend, from its registration to its last instance's end."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tandem.models.paths import BUNDLED_MODEL, BUNDLED_MODEL_NAME
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError, ModelError
from tandem.sdk import (
    DistributedRuntime,
    Endpoint,
    ModelInput,
    ModelType,
    register_llm,
    register_model,
)
from tests.sdk.worker.model_stack import ModelStack, Register, bundled_tokens, template
from tests.services import eventually

TOKENS, BOTH = ModelInput.Tokens, ModelType.Chat | ModelType.Completions


@pytest.fixture
async def stack(runtime_config: RuntimeConfig) -> AsyncIterator[ModelStack]:
    async with ModelStack(runtime_config) as running:
        yield running


@pytest.fixture
def endpoint(runtime_config: RuntimeConfig) -> Endpoint:
    """Of a process that is in no cluster: what is refused is refused before that."""
    return DistributedRuntime(runtime_config).endpoint("a.b.c")


def bundled(name: str | None = None, **fields: Any) -> Register:
    async def register(endpoint: Endpoint) -> None:
        await register_llm(TOKENS, BOTH, endpoint, BUNDLED_MODEL_NAME, name, **fields)

    return register


class Says:
    """A token model that answers one text, token by token, and keeps the requests."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.requests: list[dict[str, Any]] = []

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.requests.append(request)
        for token_id in self.token_ids[: request["stop_conditions"]["max_tokens"]]:
            yield {"token_ids": [token_id]}


async def test_a_token_model_is_there_once_served_and_leaves_with_its_last_instance(
    stack: ModelStack,
) -> None:
    assert await stack.listed() == []
    says = Says(bundled_tokens("A story"))
    workers = [await stack.worker("x.backend.generate", bundled(), says.generate) for _ in "ab"]
    assert await stack.listed() == [BUNDLED_MODEL.name]
    answer = await stack.chat(BUNDLED_MODEL_NAME, max_tokens=50, seed=7, temperature=0.5)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("A story", "stop")
    assert answer["usage"]["completion_tokens"] == len(says.token_ids)
    (request,) = says.requests
    assert request["model"] == BUNDLED_MODEL_NAME
    assert request["token_ids"][-3:]
    assert request["stop_conditions"]["max_tokens"] == 50
    assert request["sampling_options"]["seed"] == 7
    short = await stack.complete(BUNDLED_MODEL_NAME, max_tokens=1)
    assert short["choices"][0]["finish_reason"] == "length"

    await stack.stop(workers[0])
    await eventually(lambda: stack.cards(workers[0]) == [])
    assert (await stack.complete(BUNDLED_MODEL_NAME))["choices"]
    await stack.stop(workers[1])
    await eventually(lambda: not stack.server.catalog.models)
    assert await stack.listed() == []
    error = (await stack.complete(BUNDLED_MODEL_NAME))["error"]
    assert error["code"] == "unavailable"


async def test_one_process_serves_several_models_with_files_of_their_own(
    stack: ModelStack, tmp_path: Path
) -> None:
    one, two = Says(bundled_tokens("one")), Says(bundled_tokens("two"))
    worker = await stack.worker("x.backend.generate", bundled("first"), one.generate)
    own = bundled("second", custom_template_path=template(tmp_path), context_length=64)
    await stack.serve(worker, "y.backend.generate", own, two.generate)
    assert sorted(stack.cards(worker)) == ["first", "second"]
    answers = [await stack.chat(name) for name in ("first", "second")]
    assert [a["choices"][0]["message"]["content"] for a in answers] == ["one", "two"]
    assert two.requests[0]["token_ids"] == bundled_tokens("Hi")  # by its own template
    assert len(one.requests[0]["token_ids"]) > len(two.requests[0]["token_ids"])
    too_long = await stack.complete("second", prompt=[1] * 64)
    assert too_long["error"]["code"] == "context_length_exceeded"


async def test_a_text_model_gets_the_body_and_gives_openai_objects_or_text(
    stack: ModelStack,
) -> None:
    async def register(endpoint: Endpoint) -> None:
        await register_llm(ModelInput.Text, BOTH, endpoint, "any/name", user_data={"lora": "a"})

    async def generate(request: dict[str, Any]) -> AsyncIterator[Any]:
        said = request["messages"][0]["content"] if "messages" in request else request["prompt"]
        yield {"text": f"{said}, "}
        yield {"text": "you", "finish_reason": "eos"}

    await stack.worker("x.text.generate", register, generate)
    chat = await stack.chat("any/name", unknown_to_us=1)
    assert chat["choices"][0]["message"]["content"] == "Hi, you"
    assert (await stack.complete("any/name"))["choices"][0]["text"] == "Hi, you"
    (model,) = stack.server.catalog.models
    assert model.card.user_data == {"lora": "a"}
    described = (await stack.http.get("/v1/models/any/name")).json()
    assert "max_model_len" not in described


async def test_the_older_form_takes_tokens_for_backend_and_text_for_the_rest(
    stack: ModelStack,
) -> None:
    async def old_backend(endpoint: Endpoint) -> None:
        await register_llm(ModelType.Backend, endpoint, str(BUNDLED_MODEL), "tokens")

    async def old_completion(endpoint: Endpoint) -> None:
        await register_model(
            model_type=ModelType.Completion, endpoint=endpoint, model_path="m", model_name="text"
        )

    async def whole(request: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": request["prompt"], "finish_reason": "stop"}]}

    says = Says(bundled_tokens("one"))
    await stack.worker("x.a.generate", old_backend, says.generate)
    await stack.worker("x.b.generate", old_completion, whole)
    assert (await stack.chat("tokens"))["choices"][0]["message"]["content"] == "one"
    assert (await stack.complete("text"))["choices"][0]["text"] == "Hi"
    refused = (await stack.chat("text"))["error"]
    assert "not served at /v1/chat/completions" in refused["message"]


async def test_a_handler_that_gives_up_and_one_that_fails_differ_for_the_caller(
    stack: ModelStack,
) -> None:
    async def gives_up(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield {"token_ids": request["token_ids"][:1]}
        raise GeneratorExit("leaving")

    async def wrong(_request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield {"token_ids": "abc"}

    await stack.worker("x.a.generate", bundled("leaver", migration_limit=0), gives_up)
    await stack.worker("x.b.generate", bundled("wrong"), wrong)
    assert (await stack.complete("leaver"))["error"]["code"] == "incomplete"
    assert (await stack.complete("wrong"))["error"]["code"] == "internal"


@pytest.mark.parametrize(
    ("arguments", "fields", "param"),
    [
        ((TOKENS, "chat"), {}, "model_type"),
        ((TOKENS, ModelType(0)), {}, "model_type"),
        ((ModelInput.Text, ModelType.Backend), {}, "model_type"),
        ((TOKENS, BOTH), {"context_length": 0}, "context_length"),
        ((TOKENS, BOTH), {"kv_cache_block_size": 1.5}, "kv_cache_block_size"),
        ((TOKENS, BOTH), {"migration_limit": -1}, "migration_limit"),
        ((TOKENS, BOTH), {"model_name": ""}, "model_name"),
        ((TOKENS, BOTH), {"model_name": "mod\udcc3\udca8le"}, "model_name"),
        ((TOKENS, BOTH), {"custom_template_path": "/nowhere"}, "custom_template_path"),
        ((ModelInput.Text, BOTH), {"custom_template_path": "/nowhere"}, "custom_template_path"),
        ((ModelInput.Text, BOTH), {"user_data": {"a": object()}}, "user_data"),
    ],
)
async def test_a_wrong_argument_is_named(
    endpoint: Endpoint, arguments: tuple[Any, ...], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        await register_llm(*arguments, endpoint, BUNDLED_MODEL_NAME, **fields)
    assert caught.value.param == param
    assert param in str(caught.value)


async def test_an_endpoint_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match=r"endpoint is 'a\.b\.c', not of Endpoint"):
        await register_llm(TOKENS, BOTH, "a.b.c", BUNDLED_MODEL_NAME)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("model.gguf", "is a GGUF file"),
        ("hf://owner/none", "no model 'owner/none'"),
        ("/nowhere/at/all", "no model '/nowhere/at/all'"),
    ],
)
async def test_a_model_path_that_cannot_be_served_says_why(
    endpoint: Endpoint, path: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=reason):
        await register_llm(TOKENS, BOTH, endpoint, path)


async def test_a_folder_without_a_context_length_asks_for_one(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((BUNDLED_MODEL / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 9}}')
    with pytest.raises(ConfigError, match="context_length is needed"):
        await register_llm(TOKENS, BOTH, endpoint, tmp_path)


def test_model_types_can_be_joined_and_backend_is_more_than_both() -> None:
    assert ModelType.Completion is ModelType.Completions
    assert ModelType.Chat in BOTH
    assert ModelType.Backend not in BOTH
    assert ModelType.Chat in ModelType.Backend
