"""The store of responses: its bounds, its owners, and the conversations in it."""

import random

import pytest

from tandem.frontend.responses.items import Message
from tandem.frontend.responses.shared import SharedResponses
from tandem.frontend.responses.store import ResponseStore, Stored
from tandem.runtime.errors import InvalidRequestError, NotFoundError


def stored(text: str, previous: str | None = None, owner: str = "") -> Stored:
    item = b'[{"role":"user","content":"%b"}]' % text.encode()
    answer = b'{"output":[{"type":"message","role":"assistant","content":"re: %b"}]}'
    return Stored(owner, previous, item, answer % text.encode())


def test_the_least_recently_used_make_room() -> None:
    store = ResponseStore(max_responses=2, max_bytes=100_000)
    store.put("a", stored("a"))
    store.put("b", stored("b"))
    store.get("a", "")
    store.put("c", stored("c"))
    assert store.get("a", "") and store.get("c", "")
    with pytest.raises(NotFoundError):
        store.get("b", "")


def test_the_bytes_have_a_bound_whatever_is_put() -> None:
    store = ResponseStore(max_responses=1000, max_bytes=20_000)
    for number in range(100):
        store.put(str(number), stored("x" * 150 * (number % 7)))
        assert 0 < store._num_bytes <= 20_000
        check_sums(store)
    store.put("large", stored("x" * 20_000))
    with pytest.raises(NotFoundError):
        store.get("large", "")
    for number in list(store._shelves[""].stored):
        store.delete(number, "")
    check_sums(store)
    assert store._num_bytes == 0 and not store._shelves


def check_sums(store: ResponseStore) -> None:
    """The counts of the store are those of what is in it."""
    kept = [each for shelf in store._shelves.values() for each in shelf.stored.values()]
    assert store._num_responses == len(kept) <= store._max_responses
    assert store._num_bytes == sum(each.num_bytes for each in kept) <= store._max_bytes
    assert all(shelf.stored for shelf in store._shelves.values())


@pytest.mark.parametrize("seed", range(6))
def test_nobody_within_a_share_loses_a_response_to_others(seed: int) -> None:
    draw = random.Random(seed)
    owners = [f"owner {number}" for number in range(draw.randint(2, 6))]
    store = ResponseStore(
        max_responses=draw.randint(10, 40), max_bytes=draw.randint(20_000, 80_000)
    )
    kept: dict[str, list[str]] = {owner: [] for owner in owners}
    sizes: dict[str, int] = {}
    for number in range(500):
        owner = owners[min(int(draw.expovariate(1.0)), len(owners) - 1)]  # the first ones put most
        if kept[owner] and draw.random() < 0.1:
            store.delete(draw.choice(kept[owner]), owner)
        else:
            new = stored("x" * draw.choice((1, 100, 4000)), owner=owner)
            sizes[str(number)] = new.num_bytes
            store.put(str(number), new)
        check_sums(store)
        now = {each: list(shelf.stored) for each, shelf in store._shelves.items()}
        present = len({owner, *(each for each in owners if kept[each])})
        for other in owners:
            lost = set(kept[other]) - set(now.get(other, []))
            if other != owner and lost:
                num_bytes = sum(sizes[each] for each in kept[other])
                is_over = len(kept[other]) > store._max_responses / present
                assert is_over or num_bytes > store._max_bytes / present
        kept = {each: now.get(each, []) for each in owners}


async def test_a_response_is_its_owners_alone() -> None:
    store = ResponseStore(10, 100_000)
    store.put("a", stored("a", owner="alice"))
    for owner in ("", "bob"):
        with pytest.raises(NotFoundError):
            store.get("a", owner)
        with pytest.raises(NotFoundError):
            store.delete("a", owner)
        with pytest.raises(NotFoundError):
            await SharedResponses(store).conversation("a", owner, 9000)
    assert store.get("a", "alice")


async def test_a_conversation_is_read_from_its_beginning() -> None:
    store = ResponseStore(10, 100_000)
    store.put("a", stored("1"))
    store.put("b", stored("2", previous="a"))
    shared = SharedResponses(store)
    items = await shared.conversation("b", "", 9000)
    contents = [each.content for each in items if isinstance(each, Message)]
    assert contents == ["1", "re: 1", "2", "re: 2"]
    assert await shared.conversation(None, "", 9000) == []
    with pytest.raises(InvalidRequestError, match="over 2000 bytes"):
        await shared.conversation("b", "", 2000)
