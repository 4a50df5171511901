"""Writes between two NIXL agents in this process and prints the result as JSON.

The argument is the config's `runtime.host`.
"""

import json
import sys
import time

import numpy as np
import psutil

from tandem.runtime.address import new_id
from tandem.runtime.errors import TransferError
from tandem.transfer.network_devices import confine_ucx
from tandem.transfer.nixl import NixlTransport
from tandem.transfer.transport import BlockGrid

BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 64
REPEATS = 5
TIMEOUT_S = 20.0


def main() -> None:
    """Exit with a message when the library fails."""
    confine_ucx(sys.argv[1])
    try:
        sys.stdout.write(json.dumps(probe()) + "\n")
    except TransferError as error:
        sys.exit(error.message)


def probe() -> dict[str, float | bool | list[str]]:
    """Return the best of a few writes: rate, time until both sides knew, integrity of the bytes.

    With them, the addresses on which the library listens.
    """
    source = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES * NUM_BLOCKS, dtype=np.uint8)
    target = np.zeros_like(source)
    sender, receiver = NixlTransport(f"probe-{new_id()}"), NixlTransport(f"probe-{new_id()}")
    try:
        sender.register(_grid(source))
        receiver.register(_grid(target))
        peer = sender.add_peer(receiver.metadata(), _grid(target))
        whole = ((0, BLOCK_BYTES),)
        tables = sender.prepare(peer, whole, whole)
        listens = {
            socket.laddr.ip
            for socket in psutil.Process().net_connections("tcp")
            if socket.status == psutil.CONN_LISTEN
        }
        best_s = min(_write(sender, receiver, tables) for _ in range(REPEATS))
    finally:
        sender.close()
        receiver.close()
    return {
        "mebibytes": source.nbytes >> 20,
        "gb_per_s": source.nbytes / best_s / 1e9,
        "both_know_us": best_s * 1e6,
        "listens": sorted(listens),
        "is_intact": bool(np.array_equal(source, target)),
    }


def _grid(memory: np.ndarray) -> BlockGrid:
    return BlockGrid(memory.ctypes.data, BLOCK_BYTES, NUM_BLOCKS, "DRAM", 0)


def _write(sender: NixlTransport, receiver: NixlTransport, tables: object) -> float:
    """Return the seconds from the post until the receiver was notified and the sender is done."""
    blocks = range(NUM_BLOCKS)
    started = time.perf_counter()
    handle = sender.post("WRITE", tables, blocks, blocks, b"probe")
    is_done = is_notified = False
    try:
        while not (is_done and is_notified):
            is_notified = is_notified or bool(receiver.notifications())
            is_done = is_done or sender.poll(handle)
            if time.perf_counter() - started > TIMEOUT_S:
                raise TransferError(f"a write did not complete within {TIMEOUT_S:.0f} s")
        return time.perf_counter() - started
    finally:
        sender.release(handle)


if __name__ == "__main__":
    main()
