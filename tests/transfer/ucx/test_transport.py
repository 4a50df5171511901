import importlib.util
import random
from collections.abc import Callable

import numpy as np
import psutil
import pytest

from tandem.runtime.errors import TransferError
from tandem.transfer.transport import BlockGrid, Operation
from tests.transfer.ucx.sides import BLOCK, WHOLE, Side, finish, rounds, until

pytestmark = [pytest.mark.ucx, pytest.mark.slow]

if importlib.util.find_spec("ucxx") is None:
    pytest.skip("ucxx is not installed (the extra 'ucx')", allow_module_level=True)


def test_written_blocks_are_in_place_when_the_notice_arrives_and_the_write_is_done(
    pair: tuple[Side, Side],
) -> None:
    p, d = pair
    tables = p.add(d)
    local, remote = [1, 2, 3, 9, 63, 20], [5, 6, 7, 0, 63, 8]
    handle = p.transport.post("WRITE", tables, local, remote, b"landed")
    while not d.heard:
        p.transport.poll(handle)
        d.listen()
    assert d.heard == [("p", b"landed")]
    assert np.array_equal(d.blocks[remote], p.blocks[local])
    untouched = np.delete(d.blocks, remote, axis=0)
    assert not untouched.any()
    finish(p, handle, d)
    assert len(d.heard) == 1


@pytest.mark.parametrize("order", ["adjacent", "reversed", "shuffled"])
def test_all_blocks_arrive_in_whatever_order(pair: tuple[Side, Side], order: str) -> None:
    p, d = pair
    tables = p.add(d)
    remote = list(range(64))
    if order == "reversed":
        remote.reverse()
    elif order == "shuffled":
        random.Random(7).shuffle(remote)
    for attempt in range(3):
        d.blocks[:] = 0
        notice = bytes([attempt]) * 300
        finish(p, p.transport.post("WRITE", tables, list(range(64)), remote, notice), d)
        assert np.array_equal(d.blocks[remote], p.blocks)
        assert d.heard.pop() == ("p", notice)


def test_parts_of_blocks_go_to_other_parts(pair: tuple[Side, Side]) -> None:
    p, d = pair
    tables = p.add(d, ((0, 512), (1024, 256)), ((2048, 512), (4, 256)))
    finish(p, p.transport.post("WRITE", tables, [6, 7, 9], [2, 3, 1], b"parts"), d)
    assert np.array_equal(d.blocks[1, 2048:2560], p.blocks[3, :512])
    assert np.array_equal(d.blocks[1, 4:260], p.blocks[3, 1024:1280])
    assert np.array_equal(d.blocks[0, 4:260], p.blocks[4, 1024:1280])
    assert np.count_nonzero(d.blocks.any(axis=1)) == 2
    assert not d.blocks[:, 2560:].any() and not d.blocks[0, 260:].any()


def test_pieces_that_do_not_fit_together_are_refused_at_once(pair: tuple[Side, Side]) -> None:
    p, d = pair
    tables = p.add(d, ((0, 16), (16, 32)), ((64, 16), (0, 32)))
    for local, remote in ([[0], [1]], [[0, 2], [0]], [[-2], [0]], [[0], [128]], [[128], [0]]):
        with pytest.raises(TransferError):
            p.transport.post("WRITE", tables, local, remote, b"")
    for local_parts, remote_parts in ((WHOLE, ((0, 8),)), (((1, BLOCK),), ((0, BLOCK),)), ((), ())):
        with pytest.raises(TransferError):
            p.transport.prepare("d", local_parts, remote_parts)


def test_a_read_brings_the_peers_blocks(pair: tuple[Side, Side]) -> None:
    p, d = pair
    before = p.blocks.copy()
    tables = d.add(p)
    finish(d, d.transport.post("READ", tables, [1, 2, 40], [10, 11, 12], b""), p)
    assert np.array_equal(d.blocks[[1, 2, 40]], p.blocks[[10, 11, 12]])
    assert np.array_equal(p.blocks, before) and not p.heard


def test_large_blocks_go_by_rendezvous_in_both_directions(make: Callable[..., Side]) -> None:
    p, d = make("p", 2048), make("d", 2048, zeros=True)
    tables = p.add(d)
    everything = list(range(2048))
    finish(p, p.transport.post("WRITE", tables, everything, everything, b"8 MiB"), d)
    assert np.array_equal(d.blocks, p.blocks)
    d.blocks[:] = 7
    finish(p, p.transport.post("READ", tables, everything, everything, b""), d)
    assert (p.blocks == 7).all()


def test_a_write_of_no_blocks_delivers_its_notice_and_a_message_needs_no_write(
    pair: tuple[Side, Side],
) -> None:
    p, d = pair
    tables = p.add(d)
    finish(p, p.transport.post("WRITE", tables, [], [], b"nothing"), d)
    p.transport.notify("d", b"by the way")
    p.transport.notify("d", b"")
    until(lambda: len(d.heard) == 3, p, d)
    assert d.heard == [("p", b"nothing"), ("p", b"by the way"), ("p", b"")]
    with pytest.raises(TransferError, match="not connected"):
        d.transport.notify("p", b"who?")


def test_both_may_write_at_once(pair: tuple[Side, Side]) -> None:
    p, d = pair
    to_d, to_p = p.add(d), d.add(p)
    d.blocks[32:] = 9
    there = p.transport.post("WRITE", to_d, [0, 1], [0, 1], b"there")
    back = d.transport.post("WRITE", to_p, [32, 33], [32, 33], b"back")
    until(lambda: p.transport.poll(there) and d.transport.poll(back), p, d)
    rounds(p, d, count=1)  # polling receives too
    assert (p.heard, d.heard) == ([("d", b"back")], [("p", b"there")])
    assert np.array_equal(d.blocks[:2], p.blocks[:2]) and (p.blocks[32:34] == 9).all()


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_blocks_that_the_peer_does_not_have_are_refused_by_it(
    pair: tuple[Side, Side], operation: Operation
) -> None:
    p, d = pair
    believed = BlockGrid(d.grid.base_address, BLOCK, 100, "DRAM", 0)
    name = p.transport.add_peer(d.transport.metadata(), believed)
    tables = p.transport.prepare(name, WHOLE, WHOLE)
    handle = p.transport.post(operation, tables, [0, 1], [63, 64], b"")
    with pytest.raises(TransferError, match="outside of the 64 blocks"):
        finish(p, handle, d)
    assert not d.blocks.any() and not d.heard
    finish(p, p.transport.post("WRITE", tables, [0], [63], b"fits"), d)


def test_a_pool_of_other_blocks_than_announced_is_no_peer(pair: tuple[Side, Side]) -> None:
    p, d = pair
    with pytest.raises(TransferError, match="4096 bytes, not 8192"):
        p.transport.add_peer(d.transport.metadata(), BlockGrid(0, 8192, 4, "DRAM", 0))
    good = d.transport.metadata()
    for bad in (b"", b"garbage", bytes(400), good[:-1], good + b"x", good[:30] + b"!" + good[31:]):
        with pytest.raises(TransferError, match="add peer"):
            p.transport.add_peer(bad, d.grid)


def test_nothing_of_a_write_lands_once_its_peer_was_removed_before_it_answered(
    pair: tuple[Side, Side],
) -> None:
    p, d = pair
    tables = p.add(d)
    finish(p, p.transport.post("WRITE", tables, [0], [0], b"warm"), d)
    handle = p.transport.post("WRITE", tables, list(range(64)), list(range(64)), b"late")
    p.transport.remove_peer("d")
    d.blocks[:] = 0
    until(lambda: not d.transport._sessions, p, d)
    rounds(p, d)
    assert not d.blocks.any() and d.heard == [("p", b"warm")]
    with pytest.raises(TransferError, match="removed"):
        p.transport.poll(handle)
    with pytest.raises(TransferError, match="removed"):
        p.transport.post("WRITE", tables, [0], [0], b"")
    p.transport.release(handle)


def test_nothing_lands_after_the_peer_knows_that_it_was_removed(make: Callable[..., Side]) -> None:
    p, d = make("p", 2048), make("d", 2048, zeros=True)
    tables = p.add(d)
    everything = list(range(2048))
    handle = p.transport.post("WRITE", tables, everything, everything, b"cut off")
    until(lambda: bool(d.blocks.any()), p, d)
    p.transport.remove_peer("d")
    until(lambda: not d.transport._sessions, p, d)
    d.blocks[:] = 0
    rounds(p, d)
    assert not d.blocks.any() and len(d.heard) <= 1
    p.transport.release(handle)
    tables = p.add(d)
    finish(p, p.transport.post("WRITE", tables, everything, everything, b"again"), d)
    assert np.array_equal(d.blocks, p.blocks)


def test_a_released_write_that_had_not_begun_does_not_land(pair: tuple[Side, Side]) -> None:
    p, d = pair
    tables = p.add(d)
    given_up: list[tuple[Operation, bytes]] = [("WRITE", b"given up"), ("READ", b"")]
    for operation, notice in given_up:
        handle = p.transport.post(operation, tables, [0, 1], [0, 1], notice)
        p.transport.release(handle)
    p.transport.notify("d", b"behind them")
    until(lambda: bool(d.heard), p, d)
    rounds(p, d)
    (session,) = d.transport._sessions.values()
    assert not session.transfers
    assert not d.blocks.any() and d.heard == [("p", b"behind them")]


def test_closing_fails_what_the_peer_has_under_way_and_frees_everything(
    make: Callable[..., Side],
) -> None:
    p = make("p")
    num_fds: list[int] = []
    for _ in range(4):
        d = make("d", zeros=True)
        tables = p.add(d)
        finish(p, p.transport.post("WRITE", tables, [3], [4], b"ok"), d)
        handle = p.transport.post("WRITE", tables, [3], [4], b"too late")
        d.transport.close()
        d.transport.close()
        with pytest.raises(TransferError, match=r"closed|lost"):
            until(lambda handle=handle: p.transport.poll(handle), p)  # type: ignore[misc]
        with pytest.raises(TransferError):
            p.transport.notify("d", b"anybody?")
        p.transport.release(handle)
        p.transport.remove_peer("d")
        num_fds.append(psutil.Process().num_fds())
    assert num_fds[-1] <= num_fds[0] + 4  # a worker has some 20
