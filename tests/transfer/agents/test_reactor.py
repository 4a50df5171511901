from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from tandem.runtime.errors import TransferError
from tandem.transfer.agents import reactor as reactor_module
from tandem.transfer.agents.reactor import (
    HELLO,
    PeerRank,
    Selection,
    TransferOrder,
    TransferReactor,
)
from tandem.transfer.transport import BlockGrid, Operation, Parts

GRID = BlockGrid(0, 64, 8, "DRAM", 0)
WHOLE: Parts = ((0, 64),)
HALVES: Parts = ((0, 32), (32, 32))
D0, D1, OTHER = PeerRank("d", "e1", 0), PeerRank("d", "e1", 1), PeerRank("o", "e1", 0)
TIMEOUT_S = 2.0

Posted = tuple[Operation, object, list[int], list[int], bytes]


@dataclass(eq=False)
class Handle:
    peer: str
    done: bool = False
    error: str = ""


@dataclass
class ScriptedTransport:
    """Notes what it is told; transfers end when the test says so."""

    log: list[str] = field(default_factory=list)
    posted: list[Posted] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    inbox: list[tuple[str, bytes]] = field(default_factory=list)
    refuses: set[str] = field(default_factory=set)  # what fails from now on
    prepare_takes_s: float = 0.0
    now: float = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def add_peer(self, metadata: bytes, grid: BlockGrid) -> str:
        self._tell(f"add {metadata.decode()}")
        return metadata.decode()

    def remove_peer(self, peer: str) -> None:
        self._tell(f"remove {peer}")

    def prepare(self, peer: str, local_parts: Parts, remote_parts: Parts) -> object:
        self._tell(f"prepare {peer}")
        self.now += self.prepare_takes_s
        return (peer, local_parts, remote_parts)

    def post(
        self,
        operation: Operation,
        tables: object,
        local_indices: Sequence[int],
        remote_indices: Sequence[int],
        notice: bytes,
    ) -> object:
        assert isinstance(tables, tuple)
        self._tell(f"post {tables[0]}")
        self.posted.append((operation, tables, [*local_indices], [*remote_indices], notice))
        self.handles.append(Handle(tables[0]))
        return self.handles[-1]

    def poll(self, handle: object) -> bool:
        assert isinstance(handle, Handle)
        if handle.error:
            raise TransferError(handle.error)
        return handle.done

    def release(self, handle: object) -> None:
        assert isinstance(handle, Handle)
        self._tell(f"release {handle.peer}")

    def notify(self, peer: str, notice: bytes) -> None:
        self._tell(f"notify {peer} {notice.decode()}")

    def notifications(self) -> list[tuple[str, bytes]]:
        found, self.inbox = self.inbox, []
        return found

    def close(self) -> None:
        self._tell("close")

    def _tell(self, what: str) -> None:
        if what in self.refuses:
            raise TransferError(f"refused: {what}")
        self.log.append(what)


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> ScriptedTransport:
    transport = ScriptedTransport()
    clock = SimpleNamespace(perf_counter=lambda: transport.now, sleep=transport.sleep)
    monkeypatch.setattr(reactor_module, "time", clock)
    return transport


@pytest.fixture
def reactor(transport: ScriptedTransport) -> TransferReactor:
    reactor = TransferReactor("p", transport, 8, TIMEOUT_S)
    for peer in (D0, D1, OTHER):
        assert reactor.connect(peer, peer.agent_name.encode(), GRID)
    transport.log.clear()
    return reactor


@dataclass
class Ends:
    """How transfers ended: "done" or the error, in order."""

    all: list[str] = field(default_factory=list)

    def __call__(self, error: TransferError | None) -> None:
        self.all.append("done" if error is None else error.message)


def order(
    ends: Ends,
    peer: PeerRank = D0,
    pairs: Sequence[tuple[int, int]] = ((0, 0),),
    operation: Operation = "WRITE",
    parts: tuple[Parts, Parts] = (WHOLE, WHOLE),
    chosen: range = range(1),
    post_before: float | None = None,
) -> TransferOrder:
    selection = Selection(*parts, chosen)
    return TransferOrder(operation, peer, selection, pairs, b"notice", post_before, ends)


# ---- peers ------------------------------------------------------------------------------------


def test_a_peer_is_greeted_once_and_not_met_twice(transport: ScriptedTransport) -> None:
    reactor = TransferReactor("p", transport, 8, TIMEOUT_S)
    assert reactor.connect(D0, b"d.e1.0", GRID) is True
    assert reactor.connect(D0, b"d.e1.0", GRID) is False
    assert transport.log == ["add d.e1.0", f"notify d.e1.0 {HELLO.decode()}"]


@pytest.mark.parametrize(
    ("name", "refused", "error"),
    [
        ("d.e1.1", "", r"the metadata of d\.e1\.0 is that of d\.e1\.1"),
        ("d.e1.0", f"notify d.e1.0 {HELLO.decode()}", "refused: notify"),
    ],
)
def test_a_peer_that_is_another_or_cannot_be_greeted_is_forgotten(
    name: str, refused: str, error: str, transport: ScriptedTransport
) -> None:
    reactor = TransferReactor("p", transport, 8, TIMEOUT_S)
    transport.refuses = {refused}
    with pytest.raises(TransferError, match=error):
        reactor.connect(D0, name.encode(), GRID)
    assert transport.log == [f"add {name}", f"remove {name}"]
    transport.refuses = set()
    assert reactor.connect(D0, b"d.e1.0", GRID)


def test_a_new_epoch_ends_the_transfers_of_the_old_one_of_that_rank_only(
    reactor: TransferReactor,
) -> None:
    ends, others = Ends(), Ends()
    reactor.post(order(ends))
    reactor.post(order(others, D1))
    restarted = replace(D0, epoch="e2")
    assert reactor.connect(restarted, b"d.e2.0", GRID)
    assert ends.all == ["WRITE with d.e1.0: it restarted"] and not others.all
    reactor.post(order(ends))
    assert ends.all[1:] == ["d.e1.0: not connected"]
    reactor.post(order(ends, restarted))
    assert len(ends.all) == 2 and reactor.num_transfers == 2


def test_descriptors_are_prepared_once_per_cut_and_again_after_a_reconnect(
    reactor: TransferReactor, transport: ScriptedTransport
) -> None:
    ends = Ends()
    reactor.prepare(D0, Selection(WHOLE, WHOLE, range(1)))
    for parts in ((WHOLE, WHOLE), (WHOLE, WHOLE), (HALVES, HALVES), (WHOLE, WHOLE)):
        reactor.post(order(ends, parts=parts))
    assert transport.log.count("prepare d.e1.0") == 2
    reactor.drop_peer("d", "told to")
    reactor.connect(D0, b"d.e1.0", GRID)
    reactor.post(order(ends))
    assert transport.log.count("prepare d.e1.0") == 3


def test_dropping_a_peer_takes_all_its_ranks_and_unknown_ones_are_fine(
    reactor: TransferReactor, transport: ScriptedTransport
) -> None:
    reactor.drop_peer("d", "told to")
    reactor.drop_peer("nobody", "told to")
    assert transport.log == ["remove d.e1.0", "remove d.e1.1"]


# ---- posting ----------------------------------------------------------------------------------


def test_parts_are_indexed_block_by_block_on_each_side(
    reactor: TransferReactor, transport: ScriptedTransport
) -> None:
    thirds: Parts = ((0, 16), (16, 16), (48, 16))
    quarters: Parts = ((0, 16), (16, 16), (32, 16), (48, 16))
    parts = (thirds, quarters)
    reactor.post(order(Ends(), pairs=[(2, 5), (7, 0)], parts=parts, chosen=range(1, 3)))
    operation, tables, local, remote, notice = transport.posted[0]
    assert (operation, tables, notice) == ("WRITE", ("d.e1.0", *parts), b"notice")
    assert local == [7, 8, 22, 23]
    assert remote == [21, 22, 1, 2]


@pytest.mark.parametrize(
    ("pairs", "error"),
    [
        ([], "no blocks"),
        ([(0, 0), (8, 0)], "block 8 of 8 and block 0 of 8 are out of range"),
        ([(0, 8)], "out of range"),
        ([(-1, 0)], "out of range"),
        ([(0, -1)], "out of range"),
    ],
)
def test_blocks_that_a_pool_does_not_have_are_not_posted_and_the_peer_is_kept(
    pairs: list[tuple[int, int]], error: str, reactor: TransferReactor, transport: ScriptedTransport
) -> None:
    ends = Ends()
    reactor.post(order(ends, pairs=pairs))
    assert len(ends.all) == 1 and error in ends.all[0]
    assert not transport.log and not reactor.num_transfers
    reactor.post(order(ends))
    assert transport.log[-1] == "post d.e1.0"


def test_a_lease_that_ends_before_the_post_stops_it_even_while_descriptors_are_prepared(
    reactor: TransferReactor, transport: ScriptedTransport
) -> None:
    ends = Ends()
    reactor.post(order(ends, post_before=transport.now))
    assert ends.all == ["WRITE with d.e1.0: its lease is over"]
    transport.prepare_takes_s = 0.5
    reactor.post(order(ends, parts=(HALVES, HALVES), post_before=transport.now + 0.4))
    assert len(ends.all) == 2 and not transport.posted
    reactor.post(order(ends, parts=(HALVES, HALVES), post_before=transport.now + 0.4))
    assert len(ends.all) == 2 and len(transport.posted) == 1


def test_a_post_that_fails_takes_the_connection_and_its_siblings_with_it(
    reactor: TransferReactor, transport: ScriptedTransport
) -> None:
    sibling, other, failing = Ends(), Ends(), Ends()
    reactor.post(order(sibling))
    reactor.post(order(other, D1))
    transport.refuses = {"post d.e1.0"}
    transport.log.clear()
    reactor.post(order(failing))
    assert transport.log == ["release d.e1.0", "remove d.e1.0"]
    assert failing.all == ["refused: post d.e1.0"]
    assert sibling.all == ["WRITE with d.e1.0: a transfer failed: refused: post d.e1.0"]
    assert not other.all and reactor.num_transfers == 1


def test_descriptors_that_cannot_be_prepared_fail_the_transfer_alone(
    reactor: TransferReactor, transport: ScriptedTransport
) -> None:
    sibling, failing = Ends(), Ends()
    reactor.post(order(sibling))
    transport.refuses = {"prepare d.e1.0"}
    reactor.post(order(failing, parts=(HALVES, HALVES)))
    assert failing.all == ["refused: prepare d.e1.0"] and not sibling.all


# ---- how transfers end ------------------------------------------------------------------------


def test_a_transfer_ends_once_and_its_handle_is_released(
    reactor: TransferReactor, transport: ScriptedTransport
) -> None:
    ends = Ends()
    reactor.post(order(ends))
    reactor.poll()
    assert not ends.all
    transport.handles[0].done = True
    for _ in range(3):
        reactor.poll()
    assert ends.all == ["done"] and transport.log.count("release d.e1.0") == 1
    reactor.drop_peer("d", "told to")
    assert ends.all == ["done"]


def test_a_failed_transfer_takes_its_siblings_with_it_after_their_handles_and_no_others(
    reactor: TransferReactor, transport: ScriptedTransport
) -> None:
    failed, sibling, other = Ends(), Ends(), Ends()
    for ends, peer in ((failed, D0), (sibling, D0), (other, OTHER)):
        reactor.post(order(ends, peer))
    transport.log.clear()
    transport.handles[0].error = "lost"
    transport.handles[1].done = True  # nobody can tell any more
    transport.handles[2].done = True
    reactor.poll()
    assert transport.log[:3] == ["release d.e1.0", "release d.e1.0", "remove d.e1.0"]
    assert failed.all == sibling.all == ["WRITE with d.e1.0: lost"]
    assert other.all == ["done"] and not reactor.num_transfers


def test_a_transfer_that_takes_too_long_tears_its_connection_down(
    reactor: TransferReactor, transport: ScriptedTransport
) -> None:
    late, later, other = Ends(), Ends(), Ends()
    reactor.post(order(late, operation="READ"))
    transport.now += TIMEOUT_S / 2
    reactor.post(order(later))
    reactor.post(order(other, D1))
    transport.now += TIMEOUT_S / 2
    reactor.poll()
    assert not late.all
    transport.now += 0.01
    reactor.poll()
    assert late.all == ["READ with d.e1.0: a transfer took more than 2.0 s"]
    assert later.all == ["WRITE with d.e1.0: a transfer took more than 2.0 s"]
    assert not other.all
    assert transport.log[-1] == "remove d.e1.0"


def test_the_longest_write_is_forgotten_with_time_and_reads_do_not_count(
    reactor: TransferReactor, transport: ScriptedTransport
) -> None:
    for operation, took_s, longest_s in (
        ("READ", 1.5, 0.0),
        ("WRITE", 1.0, 1.0),
        ("WRITE", 0.1, 0.95),
        ("WRITE", 0.1, 0.9025),
        ("WRITE", 1.2, 1.2),
    ):
        reactor.post(order(Ends(), operation=operation))  # type: ignore[arg-type]
        transport.now += took_s
        transport.handles[-1].done = True
        reactor.poll()
        assert reactor.longest_write_s == pytest.approx(longest_s)


def test_closing_fails_what_is_under_way_and_closes_the_transport_last(
    reactor: TransferReactor, transport: ScriptedTransport
) -> None:
    ends = Ends()
    reactor.post(order(ends, OTHER))
    reactor.close()
    assert ends.all == ["WRITE with o.e1.0: the agent closes"]
    assert transport.log[-1] == "close" and "remove o.e1.0" in transport.log


@pytest.mark.parametrize(
    ("takes_s", "end"),
    [(TIMEOUT_S - 1, "done"), (TIMEOUT_S + 1, "READ with d.e1.0: a transfer took more than 2.0 s")],
)
def test_a_reader_leaves_when_its_read_has_ended_or_is_too_late(
    reactor: TransferReactor, transport: ScriptedTransport, takes_s: float, end: str
) -> None:
    ends, until = Ends(), transport.now + takes_s
    reactor.post(order(ends, operation="READ"))

    def polled(handle: object) -> bool:
        assert not [line for line in transport.log if line.startswith("remove")]
        return transport.now >= until

    transport.poll = polled  # type: ignore[method-assign]
    reactor.close()
    assert ends.all == [end]
    assert transport.log[-1] == "close" and "remove d.e1.0" in transport.log


@dataclass
class Device:
    """Stands for a GPU: what it was given has run once `is_idle`."""

    is_idle: bool = False
    num_asked: int = 0

    def begin_settling(self) -> Callable[[], bool]:
        self.num_asked += 1
        return lambda: self.is_idle


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def gpu_reactor(transport: ScriptedTransport, device: Device) -> TransferReactor:
    reactor = TransferReactor("p", transport, 8, TIMEOUT_S, device.begin_settling)
    for peer in (D0, OTHER):
        assert reactor.connect(peer, peer.agent_name.encode(), GRID)
    return reactor


def test_on_a_gpu_a_transfer_fails_only_once_its_copies_have_run(
    gpu_reactor: TransferReactor, transport: ScriptedTransport, device: Device
) -> None:
    late, refused, other = Ends(), Ends(), Ends()
    gpu_reactor.post(order(late))
    gpu_reactor.post(order(other, OTHER))
    transport.now += 2 * TIMEOUT_S
    transport.handles[1].done = True
    gpu_reactor.poll()
    transport.refuses = {"post o.e1.0"}
    gpu_reactor.post(order(refused, OTHER))  # the library may have begun with it
    assert other.all == ["done"] and not late.all and not refused.all
    assert {"remove d.e1.0", "remove o.e1.0"} < {*transport.log}
    assert gpu_reactor.num_transfers == device.num_asked == 2
    device.is_idle = True
    gpu_reactor.poll()
    assert late.all == ["WRITE with d.e1.0: a transfer took more than 2.0 s"]
    assert refused.all == ["refused: post o.e1.0"]
    assert not gpu_reactor.num_transfers


def test_on_a_gpu_nothing_is_waited_for_where_nothing_was_under_way(
    gpu_reactor: TransferReactor, device: Device
) -> None:
    gpu_reactor.drop_peer("d", "told to")
    assert device.num_asked == 0 and not gpu_reactor.num_transfers


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_closing_reactor_waits_for_the_gpu_with_a_limit_before_its_transport_ends(
    is_idle: bool, gpu_reactor: TransferReactor, transport: ScriptedTransport, device: Device
) -> None:
    ends = Ends()
    gpu_reactor.post(order(ends))
    device.is_idle = is_idle
    gpu_reactor.close()
    assert ends.all == ["WRITE with d.e1.0: the agent closes"] * is_idle
    assert transport.log[-1] == "close"


# ---- messages ---------------------------------------------------------------------------------


def test_messages_are_handed_on_in_the_order_in_which_they_came(
    reactor: TransferReactor, transport: ScriptedTransport
) -> None:
    transport.inbox = [("d.e1.0", HELLO), ("d.e1.0", b"one"), ("o.e1.0", b"two")]
    assert reactor.poll() == [HELLO, b"one", b"two"]
    assert reactor.poll() == []


def test_a_message_to_a_worker_goes_to_one_of_its_ranks(
    reactor: TransferReactor, transport: ScriptedTransport
) -> None:
    reactor.notify("d", b"message")
    assert transport.log == ["notify d.e1.0 message"]
    with pytest.raises(TransferError, match="notify nobody: not connected"):
        reactor.notify("nobody", b"message")
