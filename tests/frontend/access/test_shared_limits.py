"""The limits of API keys over two frontends that share them."""

import hashlib
from collections.abc import AsyncIterator

import pytest

from tandem.frontend.access.keys import ApiKey
from tandem.frontend.access.limits import Client
from tandem.frontend.access.shared_limits import SharedLimits
from tandem.frontend.config import FrontendConfig
from tandem.frontend.errors import RateLimitError
from tandem.runtime.bus.events import Listener, MemoryEvents
from tests.frontend.frontend_stack import Stack
from tests.services import eventually

KEY = "k" * 40
ENTRY = f"alice {hashlib.sha256(KEY.encode()).hexdigest()} requests_per_minute=6"


class Frontend:
    """The counts of one frontend of a bus; it tells only when the test says so."""

    def __init__(self, name: str, bus: list[tuple[str, Listener]], limit: int = 600) -> None:
        self.clients = [Client(ApiKey("alice", b"", limit, 10 * limit))]
        self.events = MemoryEvents(bus)
        self.limits = SharedLimits(self.events, "ns", name, lambda: self.clients)

    @property
    def client(self) -> Client:
        return self.clients[0]

    @property
    def num_left(self) -> int:
        assert self.client.requests is not None
        return int(self.client.requests.level)

    async def start(self) -> "Frontend":
        await self.events.start()
        await self.limits.start()
        return self

    def ask(self, times: int) -> None:
        for _ in range(times):
            self.client.admit()


@pytest.fixture
async def two() -> AsyncIterator[tuple[Frontend, Frontend]]:
    bus: list[tuple[str, Listener]] = []
    found = await Frontend("one", bus).start(), await Frontend("two", bus).start()
    yield found
    for each in found:
        await each.limits.close()


async def test_what_one_spends_the_other_lacks(two: tuple[Frontend, Frontend]) -> None:
    one, other = two
    one.ask(400)
    one.limits.tell()
    assert 200 <= other.num_left <= 210
    other.ask(200)
    other.limits.tell()
    assert one.num_left <= 10
    with pytest.raises(RateLimitError):
        one.ask(20)


async def test_a_message_that_comes_again_or_is_lost_counts_once(
    two: tuple[Frontend, Frontend],
) -> None:
    one, other = two
    one.ask(100)
    one.limits.tell()
    one.limits.tell()
    assert 500 <= other.num_left <= 510
    heard, one.limits._prefix = one.limits._prefix, "nowhere."
    one.ask(100)
    one.limits.tell()
    one.limits._prefix = heard
    one.ask(100)
    one.limits.tell()
    assert 300 <= other.num_left <= 315


async def test_tokens_that_are_given_back_are_given_back_everywhere(
    two: tuple[Frontend, Frontend],
) -> None:
    one, other = two
    charge = one.client.charge(1000, 4000)
    one.limits.tell()
    tokens = other.client.tokens
    assert tokens is not None and 1000 <= tokens.level <= 1100
    charge.end(500, is_returned=False)
    one.limits.tell()
    assert 4500 <= tokens.level <= 4700


async def test_a_frontend_that_comes_has_no_room_of_its_own() -> None:
    bus: list[tuple[str, Listener]] = []
    one = await Frontend("one", bus).start()
    one.ask(500)
    late = await Frontend("late", bus).start()
    one.limits.tell()
    assert 100 <= late.num_left <= 110
    late.clients = [Client(ApiKey("alice", b"", 600, 6000))]  # its entry changed
    one.limits.tell()
    assert late.num_left <= 110
    late.ask(10)
    late.limits.tell()
    assert one.num_left <= 110
    for each in (one, late):
        await each.limits.close()


async def test_two_frontends_serve_one_limit() -> None:
    config = FrontendConfig(port=0, api_keys=ENTRY, share_limits=True)
    async with Stack(config) as first:
        other = Stack(config, num_workers=0, store=first.store, listeners=first.listeners)
        async with other as second:
            await eventually(lambda: second.num_known == 1)
            for stack in (first, second):
                stack.http.headers["x-api-key"] = KEY
            statuses = [(await first.complete(max_tokens=1)).status_code for _ in range(5)]
            assert statuses == [200] * 5
            (client,) = second.server.access.clients
            assert client.requests is not None
            bucket = client.requests
            await eventually(lambda: bucket.level < 3)
            statuses = [(await second.complete(max_tokens=1)).status_code for _ in range(5)]
            assert 200 in statuses and statuses.count(429) >= 2


async def test_by_default_each_counts_for_itself() -> None:
    config = FrontendConfig(port=0, api_keys=ENTRY)
    async with Stack(config) as first:
        assert not any("limits" in subject for subject, _ in first.listeners)
