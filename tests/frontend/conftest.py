"""A frontend with one fake decode worker."""

from collections.abc import AsyncIterator

import openai
import pytest

from tests.frontend.frontend_stack import Stack


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with Stack() as running:
        yield running


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of this frontend, which tries once."""
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="none", max_retries=0
    ) as running:
        yield running
