"""The agent's face: lists of descriptors, kinds of memory, and a connector as one is taught."""

import ctypes
import struct
import threading
import time
import uuid

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.runtime.errors import InvalidRequestError, ProtocolError, TransferError
from tandem.sdk.nixl import agent as agent_module
from tandem.sdk.nixl import memory as nixl_memory
from tandem.sdk.nixl import nixl_agent, nixl_agent_config
from tandem.sdk.nixl.descriptors import Pieces, pack, unpack
from tandem.sdk.nixl.handles import RegisteredMemory
from tandem.sdk.nixl.memory import check_memory

rows = st.tuples(st.integers(1, 2**50), st.integers(1, 2**20), st.integers(0, 7))
runs = st.lists(st.tuples(rows, st.integers(1, 5)), min_size=1, max_size=8)


@settings(max_examples=50)
@given(runs=runs, memory=st.sampled_from(["DRAM", "VRAM"]))
def test_packed_pieces_come_back_in_their_order(
    runs: list[tuple[tuple[int, int, int], int]], memory: str
) -> None:
    table = [
        (address + index * length, length, device)
        for (address, length, device), count in runs
        for index in range(count)
    ]
    pieces = Pieces("VRAM" if memory == "VRAM" else "DRAM", np.array(table, dtype=np.uint64))
    packed = pack(pieces)
    assert len(packed) <= 8 + 32 * len(runs)
    again = unpack(packed)
    assert again.memory == memory
    assert again.table.tolist() == [list(row) for row in table]


def test_a_packed_list_has_these_bytes() -> None:
    table = np.array([(4096, 64, 1), (4160, 64, 1), (8192, 64, 1)], dtype=np.uint64)
    expected = b"TNB1\x01\0\0\0" + struct.pack("<8Q", 4096, 64, 1, 2, 8192, 64, 1, 1)
    assert pack(Pieces("VRAM", table)) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are not a list"),
        (b"TNB1\0\0\0\0", "8 bytes are not a list"),
        (b"TNB1\0\0\0\0" + b"\0" * 33, "41 bytes are not a list"),
        (b"\x80\x04\x95\0\0\0\0\0" + b"\0" * 32, "not made by get_xfer_descs"),
        (b"TNB1\x02\0\0\0" + b"\1" * 32, "not made by get_xfer_descs"),
        (b"TNB1\0\0\0\0" + struct.pack("<4Q", 1, 1, 0, 0), "0 pieces of 1 bytes"),
        (b"TNB1\0\0\0\0" + struct.pack("<4Q", 1, 0, 0, 1), "1 pieces of 0 bytes"),
        (b"TNB1\0\0\0\0" + struct.pack("<4Q", 1, 2**40, 0, 2**30), "1073741824 pieces of"),
        (b"TNB1\0\0\0\0" + struct.pack("<4Q", 1, 1, 0, 2**25), "more than 16777216 pieces"),
    ],
)
def test_bytes_that_are_no_list_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        unpack(data)


def test_memory_of_the_host_is_no_vram() -> None:
    kv = torch.zeros(4, 16)
    agent = nixl_agent(str(uuid.uuid4()), None)
    regions = [(kv.data_ptr(), kv.nbytes, 0, "")]
    with pytest.raises(
        InvalidRequestError, match=r"'VRAM' was given, but 0x\w+ is a host's memory"
    ):
        agent.get_reg_descs(regions, "VRAM")
    with pytest.raises(
        InvalidRequestError, match="'VRAM' was given, but the tensors are in 'DRAM'"
    ):
        agent.register_memory(kv, "VRAM")
    with pytest.raises(InvalidRequestError, match="mem_type: 'HBM' is not 'DRAM' or 'VRAM'"):
        agent.get_xfer_descs([(1, 1, 0)], "HBM")
    agent.close()


def test_the_cuda_driver_decides_the_kind_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        """Device memory at 1, pinned memory of the host at 2; all else it does not know."""

        def cuPointerGetAttribute(self, result: object, attribute: int, address: object) -> int:
            assert attribute == 2 and isinstance(address, ctypes.c_uint64)
            kinds = {1: 2, 2: 1}
            kind = ctypes.cast(result, ctypes.POINTER(ctypes.c_uint))  # type: ignore[arg-type]
            kind[0] = kinds.get(address.value, 0)
            return 0 if address.value in kinds else 1

    monkeypatch.setattr(nixl_memory, "cuda_driver", Driver)
    check_memory("VRAM", [1])
    check_memory("DRAM", [2, 3])
    for memory, address, owner in (("DRAM", 1, "GPU"), ("VRAM", 2, "host"), ("VRAM", 3, "host")):
        with pytest.raises(InvalidRequestError, match=f"0x{address} is a {owner}'s memory"):
            check_memory("VRAM" if memory == "VRAM" else "DRAM", [address])


@pytest.mark.parametrize("has_thread", [True, False])
def test_an_agent_writes_by_index_and_notifies_when_it_is_done(has_thread: bool) -> None:
    config = nixl_agent_config(enable_prog_thread=has_thread)
    ours, theirs = torch.arange(64.0).reshape(8, 8), torch.zeros(8, 8)
    source, target = nixl_agent("source", config), nixl_agent("target", config)
    blocks = {}
    for agent, kv in ((source, ours), (target, theirs)):
        agent.register_memory(agent.get_reg_descs([(kv.data_ptr(), kv.nbytes, 0, "")], "DRAM"))
        rows = [(kv.data_ptr() + 32 * index, 32, 0) for index in range(8)]
        blocks[agent.name] = agent.get_xfer_descs(rows, "DRAM")
    local = source.prep_xfer_dlist("NIXL_INIT_AGENT", blocks["source"])
    with pytest.raises(InvalidRequestError, match="agent_name: 'target' was not added"):
        source.prep_xfer_dlist("target", blocks["target"])
    assert source.add_remote_agent(target.get_agent_metadata()) == "target"
    remote = source.prep_xfer_dlist("target", blocks["target"])
    with pytest.raises(InvalidRequestError, match="operation: 'COPY' is not 'WRITE' or 'READ'"):
        source.make_prepped_xfer("COPY", local, [0], remote, [0])
    handle = source.make_prepped_xfer("WRITE", local, [1, 3], remote, [0, 7], b"written")
    with pytest.raises(InvalidRequestError, match=r"handle: transfer\(\) comes first"):
        source.check_xfer_state(handle)
    state = source.transfer(handle)
    messages: dict[str, list[bytes]] = {}
    deadline = time.monotonic() + 20
    while state != "DONE" or not messages:
        assert time.monotonic() < deadline
        messages = messages or target.get_new_notifs()
        state = source.check_xfer_state(handle)
    assert messages == {"source": [b"written"]}
    assert theirs[0].equal(ours[1]) and theirs[7].equal(ours[3]) and not theirs[1:7].any()
    source.release_xfer_handle(handle)
    source.close()
    target.close()


def test_pieces_of_other_sizes_are_not_paired() -> None:
    agent = nixl_agent("alone")
    kv = torch.zeros(64, dtype=torch.uint8)
    agent.register_memory([kv])
    sizes = agent.get_xfer_descs(
        [(kv.data_ptr(), 16, 0), (kv.data_ptr() + 16, 16, 0), (kv.data_ptr() + 32, 32, 0)], "DRAM"
    )
    side = agent.prep_xfer_dlist("", sizes)
    message = "remote_indices: piece 1 has 32 bytes, and 16 on this side"
    with pytest.raises(InvalidRequestError, match=message):
        agent.make_prepped_xfer("WRITE", side, [0, 1], side, [0, 2])
    for descs, message in (
        ([], "descs: must not be empty"),
        ([(0, 1, 0)], "descs: item 0 is 1 bytes at 0x0 of device 0"),
        ([(1, 1, 0), (1, -1, 0)], "descs: item 1 is -1 bytes"),
        ([(1, 1)], r"descs: item 0 is not \(address, bytes, device id\)"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            agent.get_xfer_descs(descs, "DRAM")
    agent.close()


def test_memory_that_was_given_back_is_out_of_reach() -> None:
    kv = torch.zeros(4, 16)
    target, source = nixl_agent("giver"), nixl_agent("taker")
    registered = target.register_memory(kv)
    descs = target.get_xfer_descs(kv)
    target.deregister_memory(registered)
    source.add_remote_agent(target.get_agent_metadata())
    with pytest.raises(TransferError, match="prepare the blocks of giver"):
        source.prep_xfer_dlist("giver", descs)
    with pytest.raises(TransferError, match="NIXL has no backend NOSUCH here"):
        nixl_agent("other", nixl_agent_config(backends=["UCX", "NOSUCH"]))
    source.close()
    target.close()


def test_every_thread_that_polls_memory_of_a_gpu_has_its_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """UCX crashes on a thread without one."""
    bound: set[tuple[str, int]] = set()

    def ensure(device_id: int) -> None:
        bound.add((threading.current_thread().name, device_id))

    monkeypatch.setattr(agent_module, "ensure_cuda_context", ensure)
    name = f"bound-{uuid.uuid4()}"
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=True))
    try:
        with pytest.raises(TransferError):  # there is no GPU, or nothing at the address
            agent.register_memory(RegisteredMemory("VRAM", [(4096, 64, 3, "")]))
        until = time.perf_counter() + 10
        while (f"nixl-{name}", 3) not in bound and time.perf_counter() < until:
            time.sleep(0.001)
    finally:
        agent.close()
    assert {(threading.current_thread().name, 3), (f"nixl-{name}", 3)} <= bound
