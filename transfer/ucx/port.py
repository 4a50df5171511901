"""The only module that uses ucxx: a worker that sends and receives tagged messages, no threads.

This module relies on these properties of the library (ucxx 0.52 over UCX 1.21, its low-level
synchronous interface):

- Endpoints report the death of their peer, so UCX chooses only transports that detect it: RDMA
  between hosts, TCP within one (a death is seen in a millisecond). Shared memory can be made to
  detect it (UCX_POSIX_ERROR_HANDLING=y, UCX_SYSV_ERROR_HANDLING=y; five times as fast), but there a
  peer that is stopped or killed while it fills its slot of the receiver's queue blocks the messages
  of all others. That happened in one stop of ten.
- For the same reason only memory whose registration can be revoked is read by the peer: RDMA, but
  never cross-memory attach, which NIXL's one-sided writes use.
- It keeps no reference to the memory of a request; a request whose last reference goes is
  cancelled, which takes effect only on receives that have not been matched by a message.
- Closing an endpoint cancels its receives, fails its sends, revokes the peer's right to read their
  memory, and waits for no peer. An endpoint whose peer died has done so by itself.
- Closing an endpoint with a large send under way follows a null pointer in UCX before 1.22 where
  the context has no registration cache (openucx/ucx 11485). So a context without one is refused:
  that is one whose patches of libc's memory calls do not hold.
- A receive that is too small completes as truncated and swallows the message, whatever its size.
"""

import ctypes
import importlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.runtime.errors import TransferError
from tandem.runtime.extras import install_command
from tandem.transfer.libraries import loading, quietly, translated
from tandem.transfer.transport import BlockGrid
from tandem.transfer.ucx.wire import MAX_MESSAGE_BYTES, PAYLOAD_TAG_BITS

_CONTROL_TAG = 1 << PAYLOAD_TAG_BITS
_MAX_STEPS = 256  # library events, and messages, handled in one call
_MAX_READING = 64  # control messages being received at once
_KEEPALIVE_INTERVAL = "1s"  # the library's own is 20 s; only for deaths that nothing else tells

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _DeviceSpan:
    address: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": data, "version": 3}


class Pool:
    """Views of a registered pool that the library sends from and receives into."""

    def __init__(self, grid: BlockGrid, array: Any) -> None:
        self.num_bytes = grid.num_blocks * grid.block_bytes
        self._grid = grid
        self._array = array
        self._host = None
        if grid.memory == "DRAM":
            raw = (ctypes.c_ubyte * self.num_bytes).from_address(grid.base_address)
            self._host = np.ctypeslib.as_array(raw)

    def view(self, offset: int, num_bytes: int) -> Any:
        """Return the library's array over these bytes of the pool, without a copy."""
        assert offset >= 0 and 0 < num_bytes <= self.num_bytes - offset
        if self._host is not None:
            return self._array(self._host[offset : offset + num_bytes])
        return self._array(_DeviceSpan(self._grid.base_address + offset, num_bytes))


class UcxPort:
    """One UCX worker. Every method raises TransferError when the library fails."""

    def __init__(self) -> None:
        self._ucx, self._array = _load_library()
        options = {"RCACHE_ENABLE": "y"}
        if "UCX_KEEPALIVE_INTERVAL" not in os.environ:
            options["KEEPALIVE_INTERVAL"] = _KEEPALIVE_INTERVAL
        self._context: Any = translated(
            "UCX, context with a registration cache",
            lambda: self._ucx.UCXContext(options, (self._ucx.Feature.TAG,)),
        )
        self._worker: Any = translated("UCX, worker", lambda: self._ucx.UCXWorker(self._context))
        self._any_tag = self._ucx.UCXXTag(0), self._ucx.UCXXTagMask(0)
        self._sending: list[tuple[Any, bytes]] = []  # control messages; the bytes must stay
        self._reading: list[tuple[Any, bytearray]] = []

    def pool(self, grid: BlockGrid) -> Pool:
        return Pool(grid, self._array)

    @property
    def address(self) -> bytes:
        return translated("UCX, address", lambda: bytes(self._worker.address))

    def connect(self, address: bytes) -> Any:
        """Return an endpoint to the worker at `address`, which must be undamaged."""
        return translated(
            "UCX, connect",
            lambda: self._ucx.UCXEndpoint.create_from_worker_address(
                self._worker, self._ucx.UCXAddress.create_from_buffer(address), True
            ),
        )

    def send_message(self, endpoint: Any, data: bytes) -> None:
        """Send a control message; short messages to one peer arrive in order."""
        request = self._send(endpoint, self._array(data), _CONTROL_TAG)
        if not request.completed:
            self._sending.append((request, data))

    @property
    def all_messages_sent(self) -> bool:
        """Every control message has been sent."""
        return not self._sending

    def send_payload(self, endpoint: Any, view: Any, tag: int) -> Any:
        """Send a payload; messages of one tag are received in the order sent."""
        return self._send(endpoint, view, tag)

    def receive_payload(self, endpoint: Any, view: Any, tag: int) -> Any:
        """Receive a payload; it is cancelled when `endpoint` fails or is closed."""
        return translated("UCX, receive", lambda: endpoint.tag_recv(view, self._ucx.UCXXTag(tag)))

    def progress(self) -> None:
        """Let the library work; it moves data only here and inside its other calls."""
        for _ in range(_MAX_STEPS):
            if not translated("UCX, progress", self._worker.progress_once):
                break
        self._sending = [entry for entry in self._sending if not entry[0].completed]

    def messages(self) -> Iterator[bytes]:
        """Yield the control messages that have arrived; unexpected other messages are dropped."""
        for _ in range(_MAX_STEPS):
            if len(self._reading) >= _MAX_READING:
                break
            found = self._worker.tag_probe(*self._any_tag)
            if not found.matched:
                break
            self._accept(found.sender_tag, found.length)
        for request, data in list(self._reading):
            if request.completed:
                self._reading.remove((request, data))
                if _succeeded(request):
                    yield bytes(data)

    def close_endpoint(self, endpoint: Any) -> None:
        """End all sending to and receiving from the endpoint."""
        if endpoint.alive:  # a failed one is closed already
            quietly(endpoint.close_blocking)

    def close(self) -> None:
        """Endpoints and requests of the caller must be gone. May be called again."""
        if self._worker is None:
            return
        # The worker's end waits for messages that were not received: there must be none.
        for _ in self.messages():
            pass
        # Each request keeps the worker alive, and the worker may use their memory to its end.
        buffers = [data for _, data in [*self._reading, *self._sending]]
        self._reading.clear()
        self._sending.clear()
        self._worker = self._context = None
        buffers.clear()

    def _send(self, endpoint: Any, view: Any, tag: int) -> Any:
        return translated("UCX, send", lambda: endpoint.tag_send(view, self._ucx.UCXXTag(tag)))

    def _accept(self, tag: Any, num_bytes: int) -> None:
        data = bytearray(num_bytes if num_bytes <= MAX_MESSAGE_BYTES else 0)
        if tag.value != _CONTROL_TAG:
            data = bytearray()
        if len(data) != num_bytes:
            logger.warning("UCX, dropped an unexpected message of %d bytes", num_bytes)
        request = translated("UCX, receive", lambda: self._worker.tag_recv(self._array(data), tag))
        self._reading.append((request, data))


def finished(request: Any) -> bool:
    """Return True if a request has ended; TransferError if it failed."""
    if not request.completed:
        return False
    translated("UCX, transfer", request.check_error)
    return True


def _succeeded(request: Any) -> bool:
    try:
        return finished(request)
    except TransferError:
        return False


def _load_library() -> tuple[Any, Any]:
    before = {key for key in os.environ if key.startswith("UCX")}
    # Read when the library is loaded: with its cache of memory types it takes a pool on the GPU
    # that was allocated before for host memory.
    os.environ.setdefault("UCX_MEMTYPE_CACHE", "n")
    try:
        with loading("ucxx"):
            ucx = importlib.import_module("ucxx._lib.libucxx")
            array = importlib.import_module("ucxx._lib.arr").Array
    except ImportError as exc:
        raise TransferError(f"ucxx is not installed ({install_command('ucx')})") from exc
    finally:
        # Importing it sets more of them, which children would follow.
        for key in [key for key in os.environ if key.startswith("UCX") and key not in before]:
            del os.environ[key]
    # It also gives its logger a handler.
    theirs = logging.getLogger("ucx")
    theirs.handlers.clear()
    theirs.propagate = True
    return ucx, array
