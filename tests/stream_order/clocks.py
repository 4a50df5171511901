"""The order of a GPU's work: vector clocks of streams and of the host, and who used which memory.

A stream's work happens in its order, after what the host knew to be done when it launched it, and
after the events that the stream waited for; nothing else orders it. Two uses of the same bytes, one
of which writes, must be ordered.
"""

import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tandem.runtime.errors import TandemError

HOST = 0  # an agent: all threads of the process, which hand work to one another by locks
COLLECTION = "the collection of a step"
CELL_BYTES = 4  # of memory, for which one last writer is known
ROOT = Path(__file__).parents[2]
_OWN = {str(Path(__file__).with_name(f"{name}.py")) for name in ("clocks", "tensors", "gpu")}

Clock = dict[int, int]  # agent |-> the number of its actions that have happened
Cells = slice | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A fault of the program under test."""

    kind: str
    text: str


@dataclass(slots=True)
class Region:
    """A part of the program in which a thread waits for nothing but `allowed`."""

    name: str
    allowed: frozenset[str]
    waits: list[str] = field(default_factory=list)


class Memory:
    """One allocation: who wrote each of its cells last, and who has read it since."""

    def __init__(self, order: "Order", storage: torch.UntypedStorage, owner: int | None) -> None:
        self.base, self.num_bytes = storage.data_ptr(), storage.nbytes()
        self.owner = owner  # the stream that may use the memory anew once this is freed
        self.recorded = {owner, HOST}  # streams for whose work the allocator waits
        self.last: Clock = {}  # agent |-> its last use
        num_cells = -(-self.num_bytes // CELL_BYTES)
        # Fresh memory may be what its owner's earlier work used, and has freed since.
        before = 0 if owner is None else order.now(owner).get(owner, 0)
        self._writers = np.full(num_cells, owner or HOST, np.int32)
        self._written = np.full(num_cells, before, np.int32)
        if before:
            self.last[owner or HOST] = before
        self._reads: dict[int, npt.NDArray[np.int32]] = {}
        self._order, self._storage = order, storage  # alive until this is not
        order.live[self.base] = weakref.ref(self)

    def read(self, cells: Cells, agent: int, clock: Clock) -> tuple[int, int] | None:
        """Note a read; return the unordered write (agent, action) before it, if there is one."""
        if agent not in self._reads:
            self._reads[agent] = np.zeros(len(self._writers), np.int32)
        self._reads[agent][cells] = clock[agent]
        return self._unordered_write(cells, clock)

    def write(self, cells: Cells, agent: int, clock: Clock) -> tuple[int, int] | None:
        """Note a write; return the unordered use before it, if there is one."""
        found = self._unordered_write(cells, clock)
        for reader, reads in self._reads.items() if len(self.last) > 1 else ():
            last = int(reads[cells].max(initial=0))
            if last > clock.get(reader, 0):
                found = reader, last
        self._writers[cells], self._written[cells] = agent, clock[agent]
        return found

    def _unordered_write(self, cells: Cells, clock: Clock) -> tuple[int, int] | None:
        if len(self.last) == 1:
            return None
        writers, written = self._writers[cells], self._written[cells]
        for writer in np.unique(writers).tolist():
            last = int(written[writers == writer].max())
            if last > clock.get(writer, 0):
                return writer, last
        return None

    def cells_of(self, tensor: torch.Tensor) -> Cells:
        """Return the cells from the first to the last byte of a tensor in this memory."""
        spans = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = (sum(spans) + 1) * tensor.element_size() if tensor.numel() else 0
        return self.cells_at(tensor.data_ptr() if num_bytes else self.base, num_bytes)

    def cells_at(self, address: int, num_bytes: int) -> slice:
        first = address - self.base
        return slice(first // CELL_BYTES, -(-(first + num_bytes) // CELL_BYTES))

    def __del__(self) -> None:
        self._order.freed(self)


Use = tuple[Memory, Cells]


class Order:
    """What happened before what, in one process with GPUs, and what was wrong with it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.verdicts: list[Verdict] = []
        self.live: dict[int, weakref.ref[Memory]] = {}
        self.of_thread = threading.local()
        self._clocks: dict[int, Clock] = {HOST: {HOST: 0}}
        self._names = {HOST: "the host"}
        self._actions: dict[tuple[int, int], str] = {}

    def agent(self, name: str) -> int:
        """Add a stream, or something else that works beside the host."""
        with self.lock:
            agent = len(self._clocks)
            self._clocks[agent] = dict(self._clocks[HOST])
            self._names[agent] = name
            return agent

    def act(
        self,
        agent: int,
        what: str,
        reads: Iterable[Use] = (),
        writes: Iterable[Use] = (),
        *,
        begun: bool = False,
    ) -> None:
        """Let an agent use memory, after all that the host knows to be done by now.

        `begun`: it was told to before, when it was made.
        """
        with self.lock:
            clock = self._clocks[agent]
            if not begun:
                _join(clock, self._clocks[HOST])
            clock[agent] = clock.get(agent, 0) + 1
            self._actions[agent, clock[agent]] = what = f"{what} at {place()}"
            for kind, uses in (("read", reads), ("write", writes)):
                for memory, cells in uses:
                    memory.last[agent] = clock[agent]
                    use = memory.read if kind == "read" else memory.write
                    if (before := use(cells, agent, clock)) is not None:
                        self._unordered(kind, agent, what, before)

    def _unordered(self, kind: str, agent: int, what: str, before: tuple[int, int]) -> None:
        other, _ = before
        earlier = f"{self._names[other]}: {self._actions[before]}"
        self.judge(f"unordered {kind}", f"{self._names[agent]}: {what}, beside {earlier}")

    def now(self, agent: int) -> Clock:
        """Return what has happened once an agent's actions so far have."""
        with self.lock:
            return dict(self._clocks[agent])

    def follow(self, agent: int, clock: Clock) -> None:
        """Let an agent go on only after what is in `clock`."""
        with self.lock:
            _join(self._clocks[agent], clock)

    def wait(self, kind: str, what: str) -> None:
        """Note that this thread waits for a device: "event", "stream", "device" or "copy"."""
        regions: list[Region] = getattr(self.of_thread, "regions", [])
        if getattr(self.of_thread, "graph", None) is not None:
            self.judge("wait in a capture", f"{what} at {place()}")
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        elif regions and kind not in regions[-1].allowed:
            regions[-1].waits.append(f"{what} at {place()}")

    @contextmanager
    def waiting_only_for(self, name: str, *allowed: str) -> Iterator[None]:
        """Judge other waits of this thread in the body, unless an error ends it.

        The program's own errors excuse no wait in the collection of a step.
        """
        if not hasattr(self.of_thread, "regions"):
            self.of_thread.regions = []
        region = Region(name, frozenset(allowed))
        self.of_thread.regions.append(region)
        try:
            yield
        except Exception as error:
            if name != COLLECTION or not isinstance(error, TandemError):
                region.waits.clear()  # the program sees to it that nothing is under way
            raise
        finally:
            self.of_thread.regions.remove(region)
            for each in region.waits:
                self.judge(f"host wait in {name}", each)

    def freed(self, memory: Memory) -> None:
        """Judge the end of an allocation, which its owner's later work gets anew."""
        with self.lock:
            if self.live.get(memory.base) is not None and self.live[memory.base]() is None:
                del self.live[memory.base]
            if memory.owner is None:
                return
            known = dict(self._clocks[memory.owner])
            _join(known, self._clocks[HOST])
            for agent, last in memory.last.items():
                if agent not in memory.recorded and last > known.get(agent, 0):
                    use = f"{self._names[agent]}: {self._actions[agent, last]}"
                    self.judge("freed in use", f"by {use}; freed at {place()}")

    def judge(self, kind: str, text: str) -> None:
        with self.lock:
            if (verdict := Verdict(kind, text)) not in self.verdicts:
                self.verdicts.append(verdict)

    def memory_at(self, address: int) -> Memory | None:
        """Return the allocation that holds this address."""
        with self.lock:
            for base, known in list(self.live.items()):
                memory = known()
                if memory is not None and base <= address < base + memory.num_bytes:
                    return memory
            return None


def _join(clock: Clock, other: Clock) -> None:
    for agent, last in other.items():
        if clock.get(agent, 0) < last:
            clock[agent] = last


def place() -> str:
    """Return file and line of the calling code of the project."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(str(ROOT)) and file not in _OWN and "/.venv" not in file:
            return f"{file.removeprefix(str(ROOT) + '/')}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
