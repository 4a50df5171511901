"""The public Python client, unmodified."""

import openai
import pytest

from tests.frontend.frontend_stack import MODEL, Stack, one_token_then_fail

MESSAGES = [{"role": "user", "content": "Hi"}]


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


async def test_an_error_in_a_stream_is_raised(client: openai.AsyncOpenAI, stack: Stack) -> None:
    stack.worker.script = one_token_then_fail
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="error id"):
        async for _ in stream:
            pass
