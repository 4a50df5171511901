"""Threads that fill tensors on a device straight from files, with bounded host memory.

Every tensor is cut into pieces, in file order. Each reader takes the next piece and fills it
through its lane. The lane into host memory reads into the destination. The lane to a GPU reads into
one half of a pinned buffer while the other half is being copied.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from tandem.engine.weights.checkpoint import StoredTensor
from tandem.runtime.errors import ModelError

# Large enough for full speed of a disk and of PCIe, small enough for many per model.
PIECE_BYTES = 4 << 20
MAX_READERS = 8
# PyTorch converts up to this many items in the calling thread, more in a team of its own.
_SERIAL_ITEMS = 32_768

Read = Callable[["Piece", torch.Tensor], None]  # fills all of a [num_bytes] uint8 host tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """Items of a stored tensor, and their destination."""

    stored: StoredTensor
    offset_bytes: int  # in the file
    destination: torch.Tensor  # [num_items], contiguous, of the dtype that runs
    run_bytes: int = 0  # that follow one another in the file; 0: all of them
    step_bytes: int = 0  # from the start of a run to that of the next

    @property
    def num_bytes(self) -> int:
        """The bytes to read from the file."""
        return self.destination.numel() * self.stored.dtype.itemsize


class Target(NamedTuple):
    """A stored tensor, or the part of one that a rank has, and its contiguous destination."""

    stored: StoredTensor
    destination: torch.Tensor
    first_item: int = 0  # of the stored tensor
    run_items: int = 0  # that follow one another in the file; 0: all of them
    step_items: int = 0  # from the start of a run to that of the next


def slices(
    stored: StoredTensor,
    destination: torch.Tensor,  # [..., len(rows), len(columns)], contiguous from -2 on
    shape: tuple[int, int],  # of the stored matrix, or of each of stacked ones
    rows: range,
    columns: range,
) -> Iterator[Target]:
    """Yield the parts of a stored tensor that are these rows and columns of its matrices."""
    num_rows, num_columns = shape
    if (len(rows), len(columns)) == shape:
        yield Target(stored, destination)
        return
    for index, matrix in enumerate(
        destination.unbind() if destination.dim() > 2 else [destination]
    ):
        first_item = (index * num_rows + rows.start) * num_columns
        if len(columns) == num_columns:
            yield Target(stored, matrix, first_item)
        else:
            yield Target(stored, matrix, first_item + columns.start, len(columns), num_columns)


def cut(targets: Iterable[Target], piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Cut each target into pieces of at most `piece_bytes`."""
    pieces = []
    for stored, destination, first_item, run_items, step_items in targets:
        item_bytes = stored.dtype.itemsize
        offset_bytes = stored.offset_bytes + first_item * item_bytes
        num_items = max(1, piece_bytes // item_bytes)
        if run_items:
            assert run_items <= num_items
            num_items -= num_items % run_items
        for part in torch.split(destination.view(-1), num_items):
            runs = run_items * item_bytes, step_items * item_bytes
            pieces.append(Piece(stored, offset_bytes, part, *runs))
            num_steps = len(part) // run_items if run_items else 0
            offset_bytes += num_steps * runs[1] or pieces[-1].num_bytes
    return sorted(pieces, key=lambda piece: (piece.stored.path, piece.offset_bytes))


class Lane(Protocol):
    """One reader's path into the destinations."""

    def fill(self, piece: Piece, read: Read) -> None:
        """Read the piece; its last copies may still be under way on return."""

    def finish(self) -> None:
        """Block until all pieces are in place and no memory of the lane is in use."""


class HostLane:
    """A lane into host memory: in place, or converted from a buffer that stays in the cache."""

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        self._buffer = torch.empty(piece_bytes, dtype=torch.uint8)

    def fill(self, piece: Piece, read: Read) -> None:
        """Read the piece, which is in place on return."""
        if piece.stored.dtype == piece.destination.dtype:
            read(piece, piece.destination.view(torch.uint8))
            return
        raw = self._buffer[: piece.num_bytes]
        read(piece, raw)
        sources = torch.split(raw.view(piece.stored.dtype), _SERIAL_ITEMS)
        parts = torch.split(piece.destination, _SERIAL_ITEMS)
        for part, source in zip(parts, sources, strict=True):
            part.copy_(source)

    def finish(self) -> None:
        """Return at once: every piece is in place."""


class Copied(Protocol):
    """The end of one copy to the device."""

    def synchronize(self) -> None:
        """Block until the copy is done."""


class StagingDevice(Protocol):
    """A device with memory of its own, as one lane uses it."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate host memory from which the device can copy: [num_bytes] uint8."""

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> Copied:
        """Begin to copy, converting on the device; `source` must last until the copy is done."""


class StagedLane:
    """A lane through two halves of host memory: one is filled while the other is copied."""

    def __init__(self, device: StagingDevice, piece_bytes: int = PIECE_BYTES) -> None:
        self._device = device
        self._halves = device.host_buffer(2 * piece_bytes).chunk(2)
        self._copied: list[Copied | None] = [None, None]
        self._next = 0

    def fill(self, piece: Piece, read: Read) -> None:
        """Read the piece and begin to copy it; wait for the copy before the last first."""
        my_half = self._next
        self._next = 1 - my_half
        self._wait(my_half)
        raw = self._halves[my_half][: piece.num_bytes]
        read(piece, raw)
        self._copied[my_half] = self._device.copy(raw.view(piece.stored.dtype), piece.destination)

    def finish(self) -> None:
        """Wait for the copies of both halves."""
        for half in range(2):
            self._wait(half)

    def _wait(self, half: int) -> None:
        copied, self._copied[half] = self._copied[half], None
        if copied is not None:
            copied.synchronize()


class CudaStagingDevice:
    """A GPU, on a stream of its own that starts after the work queued on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate pinned memory."""
        with torch.cuda.device(self._stream.device):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> Copied:
        """Copy in stream order. The bytes cross the bus in the stored dtype."""
        with torch.cuda.stream(self._stream):
            if source.dtype != destination.dtype:
                source = source.to(destination.device, non_blocking=True)
            destination.copy_(source, non_blocking=True)
            # A blocking event: a waiting reader leaves its core to the others.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event


def lane_for(device: torch.device) -> Lane:
    """Return a lane into the memory of `device`."""
    return HostLane() if device.type == "cpu" else StagedLane(CudaStagingDevice(device))


def num_readers() -> int:
    """Return one per usable core, at most MAX_READERS, at least two: one copies as one reads."""
    return max(2, min(MAX_READERS, len(os.sched_getaffinity(0))))


def read_pieces(
    pieces: Sequence[Piece], lanes: Sequence[Lane], advance: Callable[[int], object]
) -> None:
    """Fill every piece with one thread per lane; `advance(num_bytes)` is called from them.

    Blocks until all threads have ended. The first error ends them after their current pieces; it is
    a ModelError naming file and tensor if a file is at fault.
    """
    work = _Work(deque(pieces), threading.Event(), advance)
    with ThreadPoolExecutor(len(lanes), "weights") as pool:
        readers = [pool.submit(_Reader(work, lane).run) for lane in lanes]
        try:
            wait(readers)
        finally:
            # If this thread is interrupted: leaving the pool waits for its threads.
            work.stop.set()
    for reader in readers:
        reader.result()


@dataclass(frozen=True, slots=True)
class _Work:
    """The state that the readers share."""

    pieces: deque[Piece]
    stop: threading.Event
    advance: Callable[[int], object]


class _Reader:
    """One thread's work. It has its own file descriptors: the kernel reads ahead for each."""

    def __init__(self, work: _Work, lane: Lane) -> None:
        self._work = work
        self._lane = lane
        self._files: dict[Path, int] = {}  # path |-> file descriptor

    # Tensors made in inference mode may be written in inference mode only, others in either.
    @torch.inference_mode()
    def run(self) -> None:
        """Pass pieces through the lane until none is left or another reader has failed."""
        work = self._work
        try:
            while not work.stop.is_set():
                try:
                    piece = work.pieces.popleft()
                except IndexError:
                    return
                self._lane.fill(piece, self._read)
                work.advance(piece.num_bytes)
        except BaseException:
            work.stop.set()
            raise
        finally:
            for file in self._files.values():
                os.close(file)
            self._lane.finish()

    def _read(self, piece: Piece, raw: torch.Tensor) -> None:
        stored, run_bytes = piece.stored, piece.run_bytes or len(raw)
        whole = memoryview(raw.numpy().data)
        try:
            file = self._opened(stored.path)
            for index, start in enumerate(range(0, len(whole), run_bytes)):
                where = piece.offset_bytes + index * piece.step_bytes
                _read_all(file, whole[start : start + run_bytes], where, stored)
        except OSError as exc:
            raise ModelError(
                f"{stored.path}: tensor {stored.name}: {exc.strerror or exc}", param=stored.name
            ) from exc

    def _opened(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            # Readers interleave in a file, which looks random; a longer readahead spans that.
            os.posix_fadvise(self._files[path], 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._files[path]


def _read_all(file: int, buffer: memoryview, offset: int, stored: StoredTensor) -> None:
    """Fill `buffer` from `offset` of the file on. Raises ModelError where the file ends before."""
    while len(buffer):
        num_bytes = os.preadv(file, [buffer], offset)
        if num_bytes == 0:
            raise ModelError(
                f"{stored.path}: tensor {stored.name}: the file ends within it", param=stored.name
            )
        buffer, offset = buffer[num_bytes:], offset + num_bytes
