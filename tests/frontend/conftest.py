"""A frontend with one fake decode worker."""

from collections.abc import AsyncIterator

import openai
import pytest

from tandem.frontend.config import FrontendConfig
from tests.frontend.frontend_stack import Stack


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with Stack() as running:
        yield running


@pytest.fixture
async def pair() -> AsyncIterator[Stack]:
    """A frontend and two workers; one that failed may be asked again at once."""
    async with Stack(num_workers=2, config=FrontendConfig(port=0, exclude_s=0)) as running:
        yield running


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of this frontend, which tries once."""
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="none", max_retries=0
    ) as running:
        yield running
