"""A frontend with its page, for the tests of both."""

from collections.abc import AsyncIterator

import pytest

from tests.frontend.frontend_stack import Stack
from tests.frontend.ui.page_stack import page_stack


@pytest.fixture
async def page() -> AsyncIterator[Stack]:
    async with page_stack() as stack:
        yield stack
