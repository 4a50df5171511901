"""A frontend with one fake decode worker."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # lets tests import `frontend_stack`

from frontend_stack import Stack


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with Stack() as running:
        yield running
