"""The transfer kit: blocks between the caches of two engines, in one process and in two."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import torch

from tandem.runtime.errors import InvalidRequestError, ProtocolError, TransferError
from tandem.sdk.nixl import NixlConnector
from tests.sdk.nixl import peer as nixl_peer
from tests.sdk.nixl.peer import NUM_BLOCKS, caches
from tests.services import stands_still

T = TypeVar("T")
Connect = Callable[..., NixlConnector]
DEADLINE_S = 60.0


class PeerProcess:
    """A running nixl_peer.py."""

    def __init__(self, engine_id: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, nixl_peer.__file__, engine_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, name: str, kind: Any = Any, *arguments: object) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode((name, arguments)) + b"\n")
        self.process.stdin.flush()
        return msgspec.json.decode(self.process.stdout.readline(), type=kind)

    def metadata(self) -> tuple[bytes, bytes]:
        metadata: tuple[bytes, bytes] = self.ask("metadata", tuple[bytes, bytes])
        return metadata

    def notifs(self) -> dict[str, list[bytes]]:
        notifs: dict[str, list[bytes]] = self.ask("notifs", dict[str, list[bytes]])
        return notifs

    def stop(self) -> int:
        """Its input ends, and so it does; its exit status."""
        self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode

    def stand_still(self) -> None:
        """SIGSTOP; returns when no thread of it runs any more."""
        self.process.send_signal(signal.SIGSTOP)
        eventually(lambda: stands_still(self.process.pid))

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It stands still meanwhile."""
        self.stand_still()
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def peers() -> Iterator[list[PeerProcess]]:
    """The processes of the module's tests; one that lives at the end ends well."""
    started: list[PeerProcess] = []
    yield started
    for peer in started:
        if peer.process.poll() is None:
            assert peer.stop() == 0


@pytest.fixture
def decode(peers: list[PeerProcess]) -> PeerProcess:
    """The same process for all tests, until one has killed it."""
    if not peers or peers[-1].process.poll() is not None:
        peers.append(PeerProcess("decode"))
    return peers[-1]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connectors with a registered cache, closed at the end."""
    made: list[NixlConnector] = []

    def make(engine_id: str, kv: Any = None) -> NixlConnector:
        connector = NixlConnector(engine_id)
        made.append(connector)
        connector.register_kv_caches(caches() if kv is None else kv)
        return connector

    yield make
    for connector in made:
        connector.close()


def eventually(found: Callable[[], T | None]) -> T:
    """The first answer that is not empty."""
    deadline = time.monotonic() + DEADLINE_S
    while not (answer := found()):
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.002)
    return answer


async def test_written_blocks_are_in_another_process_when_it_is_notified(
    decode: PeerProcess, connect: Connect
) -> None:
    ours = caches()
    for block_id in range(NUM_BLOCKS):
        for cache in ours:
            cache[block_id] = block_id + 1
    prefill = connect("prefill", ours)
    assert prefill.block_len == sum(16 * 2 * head_dim * 2 for head_dim in (32, 8))
    name = prefill.add_remote_agent("decode", *decode.metadata())
    assert name.startswith("decode.0.")
    transfer = prefill.write_blocks([0, 3, 9], [12, 16, 31], "kv_transfer")
    assert eventually(lambda: decode.notifs().get(prefill.agent_name)) == [b"kv_transfer"]
    for means in decode.ask("means"):
        assert {i: mean for i, mean in enumerate(means) if mean} == {12: 1.0, 16: 4.0, 31: 10.0}
    await asyncio.wait_for(transfer, DEADLINE_S)
    assert transfer.done()


async def test_read_blocks_have_arrived_and_their_owner_is_notified(
    decode: PeerProcess, connect: Connect
) -> None:
    for block_id in (5, 6):
        decode.ask("fill", None, block_id, 40 + block_id)
    ours = caches()
    prefill = connect("prefill", ours)
    prefill.add_remote_agent("decode", *decode.metadata())
    await asyncio.wait_for(prefill.read_blocks([30, 0], [5, 6], b"free them"), DEADLINE_S)
    for cache in ours:
        assert (cache[30] == 45).all() and (cache[0] == 46).all() and not cache[1:30].any()
    assert eventually(lambda: decode.notifs().get(prefill.agent_name)) == [b"free them"]


def test_a_write_whose_handle_is_dropped_still_arrives_and_notifies(
    decode: PeerProcess, connect: Connect
) -> None:
    receiver = connect("receiver", ours := caches())
    decode.ask("add", str, "receiver", *receiver.get_agent_metadata())
    decode.ask("fill", None, 7, 3)
    for count in range(1, 21):
        assert decode.ask("write", str, [7], [count], f"block {count}") in ("PROC", "DONE")
        ((_, messages),) = eventually(receiver.get_new_notifs).items()
        assert messages == [f"block {count}".encode()]
        assert (ours[0][count] == 3).all() and not ours[0][count + 1 :].any()


async def test_a_transfer_that_is_given_up_fails_and_so_does_one_with_a_removed_peer(
    decode: PeerProcess, connect: Connect
) -> None:
    prefill = connect("prefill")
    prefill.add_remote_agent("decode", *decode.metadata())
    with decode.stopped():
        given_up, of_removed = prefill.write_blocks([0], [0]), prefill.write_blocks([1], [1])
        given_up.cancel()
        prefill.remove_remote_agent("decode")
        for transfer in (given_up, of_removed):
            with pytest.raises(TransferError, match="given up"):
                await asyncio.wait_for(transfer, DEADLINE_S)
        with pytest.raises(InvalidRequestError, match="there are 0 peers"):
            prefill.write_blocks([0], [0])


def test_with_several_peers_the_engine_must_be_named(connect: Connect) -> None:
    one, two, source = connect("one"), connect("two"), connect("source")
    with pytest.raises(InvalidRequestError, match="engine_id: required, because there are 0 peers"):
        source.write_blocks([0], [0])
    for target in (one, two):
        source.add_remote_agent(target.engine_id, *target.get_agent_metadata())
    with pytest.raises(InvalidRequestError, match="engine_id: required, because there are 2 peers"):
        source.write_blocks([0], [0])
    with pytest.raises(InvalidRequestError, match="engine_id: 'three' was not added"):
        source.write_blocks([0], [0], engine_id="three")
    source.write_blocks([0], [0], "for two", engine_id="two")
    assert eventually(two.get_new_notifs) == {source.agent_name: [b"for two"]}
    source.send_notif("for one", engine_id="one")
    assert eventually(one.get_new_notifs) == {source.agent_name: [b"for one"]}


def test_block_ids_that_can_not_be_are_refused_by_name(connect: Connect) -> None:
    source, target = connect("source"), connect("target")
    source.add_remote_agent("target", *target.get_agent_metadata())
    refused: list[tuple[list[Any], list[Any], str]] = [
        ([NUM_BLOCKS], [0], "local_block_ids: 32 is not among 0 to 31"),
        ([0], [-1], "remote_block_ids: -1 is not among 0 to 31"),
        ([], [], "local_block_ids: one or more whole numbers"),
        ([0.5], [1], "local_block_ids: one or more whole numbers"),
        ([0, 1], [2], "remote_block_ids: 1 blocks for 2 of this side"),
    ]
    for local, remote, message in refused:
        with pytest.raises(InvalidRequestError, match=message):
            source.write_blocks(local, remote)


def test_a_peer_with_another_block_layout_is_refused(connect: Connect) -> None:
    source = connect("source")
    for kv in (caches()[0], [*reversed(caches())], [*caches(), caches()[0]]):
        target = connect("target", kv)
        with pytest.raises(ProtocolError, match=r"target: .* are not blocks of 2 tensors"):
            source.add_remote_agent("target", *target.get_agent_metadata())
    target = connect("target")
    source.add_remote_agent("target", *target.get_agent_metadata())
    source.write_blocks([0], [0], "well")
    assert eventually(target.get_new_notifs) == {source.agent_name: [b"well"]}


def test_descriptors_outside_of_the_memory_that_a_peer_registered_are_refused(
    connect: Connect,
) -> None:
    source, target = connect("source"), connect("target")
    metadata, _ = target.get_agent_metadata()
    elsewhere = connect("elsewhere").get_agent_metadata()[1]
    with pytest.raises(TransferError, match="prepare the blocks of target"):
        source.add_remote_agent("target", metadata, elsewhere)
    with pytest.raises(TransferError, match="add peer"):
        source.add_remote_agent("target", b"no metadata", elsewhere)


def test_caches_that_can_not_be_registered_are_refused_by_name() -> None:
    refused: list[tuple[Any, str]] = [
        ([], "kv_caches: must not be empty"),
        (np.zeros((4, 8)).T, "descs: tensor 0 is not contiguous"),
        (torch.zeros(0, 4), r"kv_caches: tensors of \[0\] blocks"),
        ([torch.zeros(2, 4), torch.zeros(3, 4)], r"kv_caches: tensors of \[2, 3\] blocks"),
        (torch.zeros(4, 8).T, "descs: tensor 0 is not contiguous"),
        (torch.zeros(4, 4, device="meta"), "descs: tensors on 'meta' can't be moved"),
    ]
    with NixlConnector("engine") as connector:
        for kv, message in refused:
            with pytest.raises(InvalidRequestError, match=message):
                connector.register_kv_caches(kv)
        with pytest.raises(InvalidRequestError, match=r"register_kv_caches\(\) comes first"):
            connector.get_agent_metadata()
        connector.register_kv_caches(caches())
        with pytest.raises(InvalidRequestError, match="already registered"):
            connector.register_kv_caches(caches())


async def test_a_killed_peer_fails_what_is_under_way_and_its_successor_is_reached(
    decode: PeerProcess, connect: Connect
) -> None:
    prefill = connect("prefill")
    prefill.add_remote_agent("decode", *decode.metadata())
    decode.stand_still()
    transfer = prefill.write_blocks([1], [1])  # to connect takes both
    assert not transfer.done()
    decode.kill()
    with pytest.raises(TransferError, match="WRITE with decode"):
        await asyncio.wait_for(transfer, DEADLINE_S)
    successor = connect("decode")
    prefill.add_remote_agent("decode", *successor.get_agent_metadata())
    await asyncio.wait_for(prefill.write_blocks([1], [1], "again"), DEADLINE_S)
    assert eventually(successor.get_new_notifs) == {prefill.agent_name: [b"again"]}


def test_a_closed_connector_says_so_and_may_be_closed_again() -> None:
    connector = NixlConnector("early")
    connector.close()
    connector.close()
    with pytest.raises(TransferError, match=r"the agent early\.0\.\w+ is closed"):
        connector.get_new_notifs()


@pytest.mark.slow
def test_a_process_ends_well_with_an_agent_open_and_a_transfer_under_way(
    decode: PeerProcess,
) -> None:
    metadata = msgspec.json.encode(decode.metadata()).decode()
    code = f"""
import msgspec, numpy
from tandem.sdk.nixl import nixl_agent
cache = numpy.zeros(2048, dtype=numpy.uint8)
regions = [(cache.ctypes.data, cache.nbytes, 0)]
agent = nixl_agent("prefill")
agent.register_memory(regions, "DRAM")
metadata, descs = msgspec.json.decode('{metadata}', type=tuple[bytes, bytes])
sides = [("", agent.get_xfer_descs(regions, "DRAM")), (agent.add_remote_agent(metadata), descs)]
here, there = [agent.prep_xfer_dlist(*side) for side in sides]
print(agent.transfer(agent.make_prepped_xfer("WRITE", here, [0], there, [0], "never seen")))
"""
    with decode.stopped():
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S
        )
    assert ended.returncode == 0 and "PROC" in ended.stdout.splitlines(), ended
