"""A frontend with one fake decode worker."""

from collections.abc import AsyncIterator

import anthropic
import openai
import pytest

from tandem.frontend.config import FrontendConfig
from tests.frontend.frontend_stack import Stack
from tests.frontend.grammar_worker import join


@pytest.fixture
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """The worker is of the kind that the test's module names as `WORKER`, if it names one."""
    kind = getattr(request.module, "WORKER", None)
    async with Stack(num_workers=int(kind is None)) as running:
        if kind is not None:
            await join(running, kind)
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


@pytest.fixture
async def claude(stack: Stack) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's client of this frontend, which tries once."""
    async with anthropic.AsyncAnthropic(
        base_url=stack.url, api_key="none", max_retries=0
    ) as running:
        yield running
