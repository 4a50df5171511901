"""A frontend with one fake decode worker."""

from collections.abc import AsyncIterator

import pytest

from tests.frontend.frontend_stack import Stack


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with Stack() as running:
        yield running
