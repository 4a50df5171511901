"""A simulated multiprocessor for gluon_simulator: shared memory, barriers, threads by chance."""

import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

SWIZZLE = 64  # 16-bit elements in 128 bytes
UNIT = 8 * SWIZZLE  # elements whose readers and writers are known together
UNWRITTEN = 0


class SimulationError(Exception):
    """The kernel did what hardware would answer with wrong results or a hang."""


@dataclass
class Barrier:
    count: int
    pending: int
    phase: int = 0
    expected_bytes: int = 0
    offered: int = 0  # events that those who arrived in this phase know
    known: int = 0  # events that the phases completed so far tell

    def settle(self) -> None:
        if self.pending < 0 or self.expected_bytes < 0:
            raise SimulationError("more arrivals or bytes at a barrier than its phase has")
        if self.pending == 0 and self.expected_bytes == 0:
            self.known |= self.offered
            self.pending, self.phase, self.offered = self.count, self.phase + 1, 0


@dataclass
class Memory:
    """One allocation. An event is a bit: of a write, or of a read that has ended."""

    elements: torch.Tensor
    writes: list[int]
    reads: list[int]
    unfenced: list["Partition | None"]
    unit: int = UNIT


@dataclass
class Shared:
    """A view of an allocation: rows of 128 bytes lie below each other, then the next columns."""

    memory: Any
    shape: tuple[int, ...]
    start: int = 0
    dtype: torch.dtype = torch.float16
    layout: None = None
    transposed: bool = False

    def index(self, ordinal: int) -> Any:
        if not 0 <= ordinal < self.shape[0]:
            raise SimulationError(f"index {ordinal} of {self.shape}")
        if isinstance(self.memory, list):
            return Signal(self.memory, ordinal)
        size = math.prod(self.shape[1:])
        return Shared(self.memory, self.shape[1:], self.start + ordinal * size, self.dtype)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], _layout: None) -> "Shared":
        if math.prod(shape) != math.prod(self.shape):
            raise SimulationError(f"{self.shape} is not {shape}")
        return Shared(self.memory, tuple(shape), self.start, dtype)

    def permute(self, order: tuple[int, int]) -> "Shared":
        assert order == (1, 0)
        return Shared(self.memory, self.shape, self.start, self.dtype, None, True)

    def units(self) -> range:
        size, unit = math.prod(self.shape), self.memory.unit
        assert self.start % unit == 0 and size % unit == 0
        return range(self.start // unit, (self.start + size) // unit)

    def peek(self) -> torch.Tensor:
        if len(self.shape) == 1:
            return self.memory.elements[self.start : self.start + self.shape[0]].clone()
        rows, columns = self.shape
        flat = self.memory.elements[self.start : self.start + rows * columns]
        dense = flat.view(columns // SWIZZLE, rows, SWIZZLE).transpose(0, 1).reshape(rows, columns)
        return dense.T if self.transposed else dense

    def poke(self, value: torch.Tensor | float) -> None:
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            rows, columns = self.shape
            value = value.view(rows, columns // SWIZZLE, SWIZZLE).transpose(0, 1).reshape(-1)
        self.memory.elements[self.start : self.start + math.prod(self.shape)] = value

    def load(self, _layout: Any) -> torch.Tensor:
        partition = current()
        partition.know(partition.machine.begin_read(self, partition, fenced=False))
        return self.peek()

    def store(self, value: torch.Tensor) -> None:
        partition = current()
        partition.know(partition.machine.write(self, partition))
        for unit in self.units():
            self.memory.unfenced[unit] = partition
        self.poke(value)


@dataclass
class Signal:
    barriers: list[Barrier | None]
    ordinal: int

    @property
    def barrier(self) -> Barrier:
        barrier = self.barriers[self.ordinal]
        assert barrier is not None
        return barrier


@dataclass(eq=False)
class Product:
    """Issued and not waited for: there is nothing to compute with."""

    a: Any
    b: Shared
    acc: Any
    uses_acc: bool
    read: int
    done: bool = False
    value: torch.Tensor | None = None

    def finish(self) -> None:
        a = self.a.peek() if isinstance(self.a, Shared) else self.a
        self.value = a.float() @ self.b.peek().float()
        if self.uses_acc:
            acc = self.acc.value if isinstance(self.acc, Product) else self.acc
            self.value += acc
        self.done = True


@dataclass(eq=False)
class Partition:
    machine: "Machine"
    known: int = 0
    products: list[Product] = field(default_factory=list)
    ready: Callable[[], bool] = lambda: True
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ended: bool = False

    def know(self, events: int) -> None:
        self.known |= events

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let something else happen, and come back once `ready`."""
        self.ready = ready
        self.machine.back.release()
        self.go.acquire()
        if self.machine.failure is not None:
            raise SystemExit


class Machine:
    """One program's shared memory, barriers, copies under way, and partitions."""

    def __init__(self, order: random.Random) -> None:
        self.order = order
        self.num_events = 0
        self.memories: list[Memory] = []
        self.copies: list[Callable[[], None]] = []
        self.partitions: list[Partition] = []
        self.back = threading.Semaphore(0)
        self.failure: BaseException | None = None

    def event(self) -> int:
        self.num_events += 1
        return 1 << self.num_events

    def begin_read(self, view: Shared, reader: Partition, *, fenced: bool) -> int:
        event, memory = self.event(), view.memory
        for unit in view.units():
            if memory.writes[unit] == UNWRITTEN or memory.writes[unit] & ~reader.known:
                raise SimulationError("shared memory read before what was written is known")
            if fenced and memory.unfenced[unit] is not None:
                raise SimulationError("stores read by a product without a fence between")
            memory.reads[unit] |= event
        return event

    def write(self, view: Shared, writer: Partition) -> int:
        event, memory = self.event(), view.memory
        for unit in view.units():
            if (memory.writes[unit] | memory.reads[unit]) & ~writer.known:
                raise SimulationError("shared memory overwritten while it may be in use")
            memory.writes[unit], memory.reads[unit], memory.unfenced[unit] = event, 0, None
        return event

    def run(self, functions_and_args: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        for function, args in functions_and_args:
            partition = Partition(self)
            self.partitions.append(partition)
            threading.Thread(target=self._live, args=(partition, function, args)).start()
        while self.failure is None and not all(one.ended for one in self.partitions):
            try:
                self._next()
            except SimulationError as error:
                self.failure = error
        for partition in self.partitions:
            if not partition.ended:
                partition.go.release()
                self.back.acquire()
        if self.failure is None and (self.copies or any(p.products for p in self.partitions)):
            self.failure = SimulationError("the kernel ended before its copies or products")
        if self.failure is not None:
            raise self.failure

    def _next(self) -> None:
        ready = [one for one in self.partitions if not one.ended and one.ready()]
        choices = len(ready) + len(self.copies)
        if choices == 0:
            self.failure = SimulationError("everybody waits for somebody else")
            return
        chosen = self.order.randrange(choices)
        if chosen < len(ready):
            ready[chosen].go.release()
            self.back.acquire()
        else:
            self.copies.pop(chosen - len(ready))()

    def _live(
        self, partition: Partition, function: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        _THREAD.partition = partition
        partition.go.acquire()
        try:
            if self.failure is None:
                function(*args)
        except SystemExit:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        partition.ended = True
        self.back.release()


_THREAD = threading.local()


def current() -> Partition:
    partition: Partition = _THREAD.partition
    return partition
