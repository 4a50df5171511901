import os
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.kv_index import KvIndex
from tandem.runtime.wire.cluster_messages import KvEvent

A, B, C, D = (bytes([byte]) * 16 for byte in range(4))


def stored(event_id: int, *hashes: bytes, who: str = "w", epoch: str = "e") -> KvEvent:
    return KvEvent(who, epoch, event_id, stored=list(hashes))


def test_a_match_counts_leading_blocks_per_instance() -> None:
    index = KvIndex(100)
    assert index.apply(stored(1, A, B, C, who="x")) and index.apply(stored(1, A, C, who="y"))
    assert index.match([A, B, C]) == {"x": 3, "y": 1}
    assert index.match([B]) == {"x": 1}
    assert index.match([D, A]) == {} and index.match([]) == {}


def test_a_gap_drops_the_instance_until_a_snapshot() -> None:
    index = KvIndex(100)
    index.apply(stored(1, A))
    assert not index.apply(stored(3, C))
    assert index.match([A]) == {}
    assert not index.apply(stored(2, B))  # which comes late
    assert not index.apply(stored(4, D))
    index.load_snapshot(stored(4, A, B))
    assert index.apply(stored(4, D)) and index.match([D]) == {}  # the snapshot covers it
    assert index.apply(stored(5, C)) and index.match([A, B, C]) == {"w": 3}


def test_instances_that_come_take_the_places_of_those_that_left() -> None:
    index, names = KvIndex(1000), [str(number) for number in range(20)]
    for name in names:
        index.apply(stored(1, A, who=name))
    assert list(index.depths([A, B], names)) == [1.0] * 20
    index.remove_instance("3")
    index.apply(stored(1, A, B, who="new"))
    assert index.match([A, B], ["3", "4", "new"]) == {"4": 1, "new": 2}
    assert list(index.depths([A, B], ["new", "19", "3"])) == [2.0, 1.0, 0.0]
    assert list(index.depths([C], names)) == [0.0] * 20


def test_the_index_is_bounded_and_forgets_the_oldest_that_are_not_used() -> None:
    index = KvIndex(3)
    index.apply(stored(1, A, B, C))
    index.match([B])
    index.apply(stored(2, D))
    assert index.num_entries == 3
    assert index.match([C]) == {}  # the end of the chain went before its beginning
    assert index.match([A]) == index.match([B]) == index.match([D]) == {"w": 1}
    index.apply(KvEvent("w", "e", 3, removed=[C]))  # forgotten already
    assert index.num_entries == 3
    index.apply(stored(4, C))
    assert index.match([C]) == {}  # all others were looked up, and are passed over once
    index.apply(stored(5, C))
    assert index.match([B]) == {} and index.match([C]) == {"w": 1}


def test_a_block_is_used_where_it_matched_and_until_it_goes() -> None:
    index, (e, f, g) = KvIndex(3), HASHES[4:]
    index.apply(stored(1, A, B, C))
    index.match([C], ["nobody"])
    index.apply(stored(2, D))
    assert index.match([C]) == {}
    index.match([B])
    index.apply(KvEvent("w", "e", 3, removed=[B]))
    index.apply(stored(4, B))
    for event_id, block_hash, gone in ((5, e, A), (6, f, D), (7, g, B)):
        index.apply(stored(event_id, block_hash))
        assert index.match([gone]) == {}


def test_an_index_evicts_nothing_before_it_holds_more_than_it_may() -> None:
    index = KvIndex(128)
    index.apply(stored(1, *(bytes([byte]) * 16 for byte in range(128))))
    assert index.num_entries == 128
    index.apply(stored(2, bytes([128]) * 16))
    assert index.num_entries == 126  # one of 64 parts is free again


def test_an_index_evicts_no_more_than_one_part_of_itself() -> None:
    index = KvIndex(128)
    blocks = [bytes([byte]) * 16 for byte in range(66)]
    for who in "xy":
        index.apply(stored(1, *blocks[:64], who=who))
    index.apply(stored(2, *blocks[64:], who="x"))
    assert index.num_entries == 126  # two blocks of both went


HASHES = [bytes([byte]) * 16 for byte in range(7)]
_SOME = st.lists(st.sampled_from(HASHES), max_size=4)
_CHANGES = st.tuples(
    st.sampled_from("xyz"),
    _SOME,
    _SOME,
    st.booleans(),
    st.sampled_from([0, 1, 1, 1, 1, 2]),  # 0 was seen before, 2 leaves a gap
    st.sampled_from(["apply", "apply", "apply", "new epoch", "remove instance"]),
)


class Naive:
    """What instances said, as sets, and nothing clever."""

    def __init__(self) -> None:
        self.held: dict[str, set[bytes]] = {}
        self.last: dict[str, int] = {}
        self.epoch: dict[str, int] = {}

    def change(self, event: KvEvent) -> None:
        before = set() if event.cleared else self.held.get(event.instance_id, set())
        self.held[event.instance_id] = (before - set(event.removed)) | set(event.stored)

    def match(self, hashes: list[bytes]) -> dict[str, int]:
        depths = {
            who: next((at for at, each in enumerate(hashes) if each not in held), len(hashes))
            for who, held in self.held.items()
        }
        return {who: depth for who, depth in depths.items() if depth}


def replayed(
    changes: list[tuple[str, list[bytes], list[bytes], bool, int, str]], max_entries: int
) -> Iterator[tuple[KvIndex, Naive]]:
    """The state after each change; a gap is healed by a dump, as a follower does it."""
    index, naive = KvIndex(max_entries), Naive()
    for who, added, removed, cleared, step, kind in changes:
        if kind == "remove instance":
            index.remove_instance(who)
            naive.held.pop(who, None)
            naive.epoch[who] = naive.epoch.get(who, 0) + 1
            naive.last[who] = 0
        elif kind == "new epoch":
            naive.held.pop(who, None)
            naive.epoch[who] = naive.epoch.get(who, 0) + 1
            naive.last[who] = 0
        event_id = naive.last.get(who, 0) + step
        epoch = str(naive.epoch.get(who, 0))
        event = KvEvent(who, epoch, event_id, added, removed, cleared)
        if step:
            naive.change(event)
            naive.last[who] = event_id
        if not index.apply(event):
            assert index.match(HASHES, [who]) == {}  # doubt is nothing, not the old state
            held = sorted(naive.held.get(who, ()))
            index.load_snapshot(KvEvent(who, epoch, event_id, held, cleared=True))
        yield index, naive


@settings(max_examples=60)
@given(st.lists(_CHANGES, max_size=25), st.permutations(HASHES))
def test_an_index_with_room_says_exactly_what_the_instances_hold(
    changes: list[tuple[str, list[bytes], list[bytes], bool, int, str]], prompt: list[bytes]
) -> None:
    for index, naive in replayed(changes, 1000):
        assert index.match(prompt) == naive.match(prompt)
        assert index.match(prompt, ["y", "nobody"]) == {
            who: depth for who, depth in naive.match(prompt).items() if who == "y"
        }
        assert index.num_entries == sum(map(len, naive.held.values()))
        names = ["z", "nobody", "x", "y"]
        assert list(index.depths(prompt, names)) == [
            naive.match(prompt).get(each, 0) for each in names
        ]


@settings(max_examples=60)
@given(st.lists(_CHANGES, max_size=25), st.integers(1, 8), st.permutations(HASHES))
def test_a_full_index_forgets_but_never_says_too_much(
    changes: list[tuple[str, list[bytes], list[bytes], bool, int, str]],
    max_entries: int,
    prompt: list[bytes],
) -> None:
    for index, naive in replayed(changes, max_entries):
        truth = naive.match(prompt)
        for who, depth in index.match(prompt).items():
            assert 0 < depth <= truth[who]
        assert list(index.depths(prompt, ["y", "x"])) == [
            index.match(prompt, ["y", "nobody"]).get("y", 0), index.match(prompt).get("x", 0)
        ]  # fmt: skip
        assert not index.match(prompt, ["nobody"])
        assert index.num_entries <= max_entries


def test_a_full_index_keeps_the_chains_that_are_looked_up() -> None:
    index = KvIndex(1280)
    hot = [number.to_bytes(16, "big") for number in range(20)]
    index.apply(stored(1, *hot))
    for event_id in range(2, 400):
        index.apply(stored(event_id, *(os.urandom(16) for _ in range(20))))
        assert index.match(hot) == {"w": 20}
        assert index.num_entries <= 1280
