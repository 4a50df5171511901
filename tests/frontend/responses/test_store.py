"""The store of responses: its bounds, its owners, and the conversations in it."""

import pytest

from tandem.frontend.responses.items import Message
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
        assert store._num_bytes == sum(each.num_bytes for each in store._stored.values())
    store.put("large", stored("x" * 20_000))
    with pytest.raises(NotFoundError):
        store.get("large", "")
    for number in list(store._stored):
        store.delete(number, "")
    assert store._num_bytes == 0


def test_a_response_is_its_owners_alone() -> None:
    store = ResponseStore(10, 100_000)
    store.put("a", stored("a", owner="alice"))
    for owner in ("", "bob"):
        with pytest.raises(NotFoundError):
            store.get("a", owner)
        with pytest.raises(NotFoundError):
            store.delete("a", owner)
        with pytest.raises(NotFoundError):
            store.conversation("a", owner, 9000)
    assert store.get("a", "alice")


def test_a_conversation_is_read_from_its_beginning() -> None:
    store = ResponseStore(10, 100_000)
    store.put("a", stored("1"))
    store.put("b", stored("2", previous="a"))
    contents = [
        each.content for each in store.conversation("b", "", 9000) if isinstance(each, Message)
    ]
    assert contents == ["1", "re: 1", "2", "re: 2"]
    assert store.conversation(None, "", 9000) == []
    with pytest.raises(InvalidRequestError, match="over 2000 bytes"):
        store.conversation("b", "", 2000)
