"""The sampling of a model's generation_config.json counts where a request names none."""

import json
from typing import Any

import pytest

from tandem.frontend.config import FrontendConfig
from tandem.runtime.errors import ModelError
from tandem.runtime.wire.messages import ModelFiles, SamplingParams
from tandem.runtime.wire.sampling_defaults import NO_DEFAULTS, SamplingDefaults, sampling_defaults
from tests.frontend.frontend_stack import MODEL, FakeWorker, Stack, model_files
from tests.services import eventually

OF_QWEN3: dict[str, Any] = {
    "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05,
    "min_p": 0.01, "eos_token_id": [1, 2], "transformers_version": "4.51.0",
}  # fmt: skip
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
PLAIN = (1.0, 1.0, 0, 0.0, 1.0)
SUGGESTED = (0.6, 0.95, 20, 0.01, 1.05)
# path |-> a body, and the fields of sampling that the API has
BODIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/completions": ({"prompt": "Hi"}, FIELDS),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Hi"}]}, FIELDS),
    "/v1/responses": ({"input": "Hi"}, FIELDS),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
        ("temperature", "top_p", "top_k"),
    ),
}
OTHERS = (0.25, 0.5, 3, 0.125, 1.5)


def of(sampling: SamplingParams) -> tuple[float, ...]:
    return tuple(getattr(sampling, name) for name in FIELDS)


def files_with(generation_config: object) -> ModelFiles:
    content = {"generation_config.json": json.dumps(generation_config).encode()}
    return ModelFiles(model_files().files | content)


async def add_worker(stack: Stack) -> None:
    await stack.add_worker(FakeWorker, files=files_with(OF_QWEN3))
    await eventually(lambda: stack.num_known == 1)


async def sampled(stack: Stack, path: str, **fields: object) -> tuple[float, ...]:
    response = await stack.http.post(path, json={"model": MODEL} | BODIES[path][0] | fields)
    assert response.status_code == 200, response.text
    return of(stack.worker.requests[-1].sampling)


async def test_they_count_in_every_api_and_a_request_has_the_last_word() -> None:
    async with Stack(num_workers=0) as stack:
        await add_worker(stack)
        for path in BODIES:
            assert await sampled(stack, path) == SUGGESTED
            for index, (name, value) in enumerate(zip(FIELDS, OTHERS, strict=True)):
                if name in BODIES[path][1]:
                    expected = (*SUGGESTED[:index], value, *SUGGESTED[index + 1 :])
                    assert await sampled(stack, path, **{name: value}) == expected
            assert (await sampled(stack, path, temperature=0))[0] == 0


async def test_ignored_they_do_not_count() -> None:
    config = FrontendConfig(port=0, generation_config="ignore")
    async with Stack(num_workers=0, config=config) as stack:
        await add_worker(stack)
        for path in BODIES:
            assert await sampled(stack, path) == PLAIN


async def test_a_response_has_the_values_that_were_in_force() -> None:
    async with Stack(num_workers=0) as stack:
        await add_worker(stack)
        body = {"model": MODEL, "input": "Hi", "top_p": 0.5}
        found = (await stack.http.post("/v1/responses", json=body)).json()
        assert (found["temperature"], found["top_p"]) == (0.6, 0.5)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, NO_DEFAULTS),
        (dict.fromkeys(FIELDS), NO_DEFAULTS),
        (OF_QWEN3, SamplingDefaults(**dict(zip(FIELDS, SUGGESTED, strict=True)))),
        (OF_QWEN3 | {"do_sample": False}, SamplingDefaults(repetition_penalty=1.05)),
        ({"temperature": 1, "top_k": 50}, SamplingDefaults(temperature=1.0, top_k=50)),
        ({"elsewhere": float("inf")}, NO_DEFAULTS),
    ],
)
def test_they_are_read_from_the_file(content: object, expected: SamplingDefaults) -> None:
    assert sampling_defaults(files_with(content).files) == expected
    assert sampling_defaults({}) == NO_DEFAULTS


VALUES: list[Any] = [-2, 1e300, float("nan"), float("inf"), "x", True, [], {}, 10**40]


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_that_no_request_may_have_is_refused_by_name(name: str) -> None:
    for value in VALUES:
        with pytest.raises(ModelError, match=rf"generation_config\.json: .*{name}") as caught:
            sampling_defaults(files_with({name: value}).files)
        assert len(caught.value.message) < 300


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"7", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_object_is_refused(content: bytes) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        sampling_defaults({"generation_config.json": content})
