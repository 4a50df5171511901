from hypothesis import given
from hypothesis import strategies as st

from tandem.router.kv_index import KvIndex
from tandem.runtime.messages import KvEvent

A, B, C, D = (bytes([byte]) * 16 for byte in range(4))


def stored(event_id: int, *hashes: bytes, who: str = "w", epoch: str = "e") -> KvEvent:
    return KvEvent(who, epoch, event_id, stored=list(hashes))


def test_a_match_counts_leading_blocks_per_instance() -> None:
    index = KvIndex(100)
    assert index.apply(stored(1, A, B, C, who="x")) and index.apply(stored(1, A, C, who="y"))
    assert index.match([A, B, C]) == {"x": 3, "y": 1}
    assert index.match([B]) == {"x": 1}
    assert index.match([D, A]) == {} and index.match([]) == {}


def test_a_removed_block_ends_the_match_where_it_stood() -> None:
    index = KvIndex(100)
    index.apply(stored(1, A, B, C))
    index.apply(KvEvent("w", "e", 2, removed=[B]))
    assert index.match([A, B, C]) == {"w": 1}
    index.apply(KvEvent("w", "e", 3, stored=[B], cleared=True))
    assert index.match([A, B]) == {} and index.match([B]) == {"w": 1}


def test_an_event_seen_before_changes_nothing() -> None:
    index = KvIndex(100)
    index.apply(stored(1, A))
    index.apply(KvEvent("w", "e", 2, removed=[A]))
    assert index.apply(stored(1, A))
    assert index.match([A]) == {}


def test_a_gap_drops_the_instance_until_a_snapshot() -> None:
    index = KvIndex(100)
    index.apply(stored(1, A))
    assert not index.apply(stored(3, C))
    assert index.match([A]) == {}
    assert not index.apply(stored(4, D))
    index.load_snapshot(stored(4, A, B))
    assert index.apply(stored(4, D)) and index.match([D]) == {}  # the snapshot covers it
    assert index.apply(stored(5, C)) and index.match([A, B, C]) == {"w": 3}


def test_an_instance_first_heard_in_the_middle_needs_a_snapshot() -> None:
    index = KvIndex(100)
    assert not index.apply(stored(7, A))
    assert index.match([A]) == {}


def test_a_new_epoch_forgets_the_old_one() -> None:
    index = KvIndex(100)
    index.apply(stored(1, A))
    assert index.apply(stored(1, B, epoch="f"))
    assert index.match([A]) == {} and index.match([B]) == {"w": 1}


def test_a_removed_instance_leaves_nothing_behind() -> None:
    index = KvIndex(100)
    index.apply(stored(1, A, B))
    index.remove_instance("w")
    assert index.match([A]) == {} and index.num_entries == 0


def test_the_index_is_bounded_and_forgets_the_least_recently_used() -> None:
    index = KvIndex(3)
    index.apply(stored(1, A, B, C))
    index.match([A])
    index.apply(stored(2, D))
    assert index.num_entries == 3
    assert index.match([B]) == {} and index.match([A]) == {"w": 1} == index.match([D])
    index.apply(KvEvent("w", "e", 3, removed=[B]))  # forgotten already
    assert index.num_entries == 3


_CHANGES = st.tuples(
    st.sampled_from("xy"),
    st.lists(st.sampled_from([A, B, C, D]), max_size=3),
    st.lists(st.sampled_from([A, B, C, D]), max_size=3),
    st.booleans(),
    st.sampled_from([1, 1, 1, 2]),  # a step of 2 is a gap
)


@given(st.lists(_CHANGES, max_size=25), st.integers(1, 6))
def test_a_match_never_exceeds_what_the_instance_holds(
    changes: list[tuple[str, list[bytes], list[bytes], bool, int]], max_entries: int
) -> None:
    index = KvIndex(max_entries)
    held: dict[str, set[bytes]] = {"x": set(), "y": set()}
    last = {"x": 0, "y": 0}
    for who, added, removed, cleared, step in changes:
        last[who] += step
        held[who] = ((set() if cleared else held[who]) - set(removed)) | set(added)
        event = KvEvent(who, "e", last[who], list(added), list(removed), cleared)
        if not index.apply(event):
            index.load_snapshot(KvEvent(who, "e", last[who], list(held[who])))
        assert index.num_entries <= max_entries
        for who_matched, depth in index.match([A, B, C, D]).items():
            assert {A, B, C, D} and set([A, B, C, D][:depth]) <= held[who_matched]
