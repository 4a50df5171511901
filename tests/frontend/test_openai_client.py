"""The public Python client, unmodified."""

import openai
import pytest

from tests.frontend.frontend_stack import ANSWER, MODEL, Stack, one_token_then_fail, token_ids

MESSAGES = [{"role": "user", "content": "Hi"}]


async def test_it_completes_text_and_tokens(client: openai.AsyncOpenAI) -> None:
    for prompt in ("Hi", ["Hi"], token_ids("Hi"), [token_ids("Hi")]):
        answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=64)
        assert answer.choices[0].text == ANSWER
    stream = await client.completions.create(model=MODEL, prompt="Hi", max_tokens=64, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == ANSWER


async def test_it_sees_typed_errors(client: openai.AsyncOpenAI, stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=0)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="x", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    stack.worker.script = one_token_then_fail
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model=MODEL, messages=MESSAGES)


async def test_it_lists_models(client: openai.AsyncOpenAI) -> None:
    models = await client.models.list()
    assert [model.id for model in models.data] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "tandem"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody/nothing")


async def test_an_error_in_a_stream_is_raised(client: openai.AsyncOpenAI, stack: Stack) -> None:
    stack.worker.script = one_token_then_fail
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="error id"):
        async for _ in stream:
            pass
