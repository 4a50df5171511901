"""Runs a warp-specialised Gluon kernel in Python: the same source, every order of its events.

Each partition is a thread of which one at a time runs, chosen at random; copies land at random.
Reads and writes of shared memory must be ordered by what their threads have waited for, whether
or not a schedule happens to clash: a missing wait, arrival or fence is a SimulationError.
"""

import math
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tests.kernels.attention.gluon_machine import (
    UNIT,
    UNWRITTEN,
    Barrier,
    Machine,
    Memory,
    Product,
    Shared,
    Signal,
    SimulationError,
    current,
)

__all__ = ["SimulationError", "simulated"]


class Scalar(int):
    """What a load of one number gives."""

    def to(self, _dtype: torch.dtype) -> int:
        return self


@dataclass
class Pointer:
    tensor: torch.Tensor
    offset: Any = 0

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.tensor, self.offset + more)

    def flat(self) -> torch.Tensor:
        extent = 1 + sum(
            (n - 1) * s for n, s in zip(self.tensor.shape, self.tensor.stride(), strict=True)
        )
        return self.tensor.as_strided((extent,), (1,))


@dataclass
class Descriptor:
    """A matrix in global memory, copied in boxes; zeros lie around it."""

    host: Any

    @property
    def dtype(self) -> torch.dtype:
        return self.host.base.dtype

    def box(self, corner: list[int]) -> torch.Tensor:
        matrix = self.host.base.as_strided(tuple(self.host.shape), tuple(self.host.strides))
        box = torch.zeros(self.host.block_shape, dtype=self.dtype)
        (row, column), (rows, columns) = corner, self.host.block_shape
        assert row >= 0 and column >= 0 and column % 8 == 0
        inside = matrix[row : row + rows, column : column + columns]
        box[: inside.shape[0], : inside.shape[1]] = inside
        return box


class _Barriers:
    """`mbarrier`."""

    MBarrierLayout = staticmethod(lambda: None)

    @staticmethod
    def init(signal: Signal, *, count: int) -> None:
        signal.barriers[signal.ordinal] = Barrier(count, count)

    @staticmethod
    def expect(signal: Signal, num_bytes: int) -> None:
        current().pause()
        signal.barrier.expected_bytes += num_bytes
        _Barriers._arrive(signal)

    @staticmethod
    def arrive(signal: Signal, *, count: int) -> None:
        current().pause()
        for _ in range(count):
            _Barriers._arrive(signal)

    @staticmethod
    def _arrive(signal: Signal) -> None:
        signal.barrier.pending -= 1
        signal.barrier.offered |= current().known
        signal.barrier.settle()

    @staticmethod
    def wait(signal: Signal, phase: int) -> None:
        current().pause(lambda: signal.barrier.phase % 2 != phase)
        current().know(signal.barrier.known)


def _copy(source: Descriptor, corner: list[int], full: Signal, target: Shared) -> None:
    partition = current()
    partition.pause()
    event = partition.machine.write(target, partition)
    target.poke(math.nan)
    box = source.box(corner)
    assert tuple(box.shape) == target.shape

    def land() -> None:
        target.poke(box)
        full.barrier.expected_bytes -= box.numel() * box.element_size()
        full.barrier.offered |= event
        full.barrier.settle()

    partition.machine.copies.append(land)


def _multiply(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool) -> Product:
    partition = current()
    partition.pause()
    assert is_async
    read = partition.machine.begin_read(b, partition, fenced=True)
    if isinstance(a, Shared):
        read |= partition.machine.begin_read(a, partition, fenced=True)
    product = Product(a, b, acc, use_acc, read)
    partition.products.append(product)
    return product


def _wait_for_products(num_outstanding: int, deps: list[Product]) -> torch.Tensor:
    partition = current()
    partition.pause()
    while len(partition.products) > num_outstanding:
        product = partition.products.pop(0)
        product.finish()
        partition.know(product.read)
    (product,) = deps
    if not product.done:
        raise SimulationError("a product used before it is waited for")
    assert product.value is not None
    return product.value


def _fence() -> None:
    partition = current()
    partition.pause()
    for memory in partition.machine.memories:
        memory.unfenced = [None if one is partition else one for one in memory.unfenced]


class _Language:
    """`gl`, for one program of the grid. Layouts are nothing here."""

    int32, int64, float32 = torch.int32, torch.int64, torch.float32
    static_range = range
    exp2 = staticmethod(torch.exp2)
    zeros_like = staticmethod(torch.zeros_like)
    to_tensor = Scalar

    def __init__(
        self, machine: Machine, program: int, num_programs: int, let_others: Callable[[], None]
    ) -> None:
        self._machine = machine
        self._let_others = let_others
        self.program_id = lambda _axis: program
        self.num_programs = lambda _axis: num_programs

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *_args, **_kwargs: SimpleNamespace(parent=None)
        raise SimulationError(f"gl.{name} is not simulated")

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], _layout: Any) -> Shared:
        size = math.prod(shape)
        if dtype == torch.int64:
            return Shared([None] * shape[0], tuple(shape))
        unit = UNIT if dtype.is_floating_point else 1
        units = size // unit
        elements = torch.full((size,), math.nan if unit == UNIT else -1, dtype=dtype)
        memory = Memory(elements, [UNWRITTEN] * units, [0] * units, [None] * units, unit)
        self._machine.memories.append(memory)
        return Shared(memory, tuple(shape), 0, dtype)

    def warp_specialize(self, functions_and_args: Any, warps: list[int], registers: Any) -> None:
        assert len(functions_and_args) == len(warps) + 1 == len(registers) + 1
        self._machine.run(functions_and_args)

    @staticmethod
    def load(pointer: Pointer, mask: bool = True, other: int | None = None) -> Scalar:
        return Scalar(pointer.flat()[pointer.offset] if mask else other)

    @staticmethod
    def store(pointer: Pointer, value: Any, mask: torch.Tensor | None = None) -> None:
        if mask is None:
            pointer.flat()[pointer.offset] = value
            return
        mask = mask.expand(value.shape)
        pointer.flat()[pointer.offset[mask]] = value[mask]

    def atomic_add(self, pointer: Pointer, value: int, sem: str) -> int:
        self._let_others()
        element = pointer.flat()[pointer.offset : pointer.offset + 1]
        before = int(element)
        element += value
        return before

    @staticmethod
    def cdiv(dividend: int, divisor: int) -> int:
        return -(-dividend // divisor)

    @staticmethod
    def minimum(first: int, second: int) -> int:
        return min(first, second)

    @staticmethod
    def where(condition: Any, first: Any, second: Any) -> Any:
        if isinstance(condition, torch.Tensor):
            return torch.where(condition, first, second)
        return first if condition else second

    @staticmethod
    def maximum(first: Any, second: Any) -> Any:
        if isinstance(first, torch.Tensor):
            return torch.maximum(first, second)
        return max(first, second)

    @staticmethod
    def max(value: torch.Tensor, axis: int) -> Any:
        found = value.amax(axis)
        return found if found.dim() else int(found)

    @staticmethod
    def full(shape: list[int], value: int, dtype: torch.dtype, _layout: None) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype)

    @staticmethod
    def sum(value: torch.Tensor, axis: int) -> torch.Tensor:
        return value.sum(axis)

    @staticmethod
    def arange(start: int, end: int, layout: None) -> torch.Tensor:
        return torch.arange(start, end)

    @staticmethod
    def zeros(shape: list[int], dtype: torch.dtype, _layout: None) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    @staticmethod
    def convert_layout(value: torch.Tensor, _layout: None) -> torch.Tensor:
        return value


def simulated(module: Any, kernel: str, seed: int) -> Any:
    """What to put in the place of `kernel` in `module`: its launches run here, now, on tensors."""
    order = random.Random(seed)

    def launch(grid: tuple[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrapped = [_wrap(arg) for arg in args]
        kwargs.pop("num_warps")
        waiting = order.sample(range(grid[0]), grid[0])

        def run_next() -> None:
            language = _Language(Machine(order), waiting.pop(), grid[0], let_others)
            _namespace(module, language)[kernel](*wrapped, **kwargs)

        def let_others() -> None:
            """Run another program to its end, by chance: what programs share goes to any."""
            if waiting and order.random() < 0.5:
                run_next()

        while waiting:
            run_next()

    class Launcher:
        fn = getattr(module, kernel).fn

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *args, **kwargs: launch(grid, args, kwargs)

    return Launcher()


def _wrap(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return tuple(map(_wrap, arg))
    if isinstance(arg, torch.Tensor):
        return Pointer(arg)
    return Descriptor(arg) if hasattr(arg, "block_shape") else arg


def _namespace(module: Any, language: _Language) -> dict[str, Any]:
    names = dict(vars(module))
    for name, value in vars(module).items():
        if hasattr(value, "fn"):
            code = value.fn.__code__
            names[name] = types.FunctionType(code, names, name, value.fn.__defaults__)
        elif type(value).__name__ == "constexpr":
            names[name] = value.value
    names["gl"] = language
    names["mbarrier"] = _Barriers
    names["tma"] = SimpleNamespace(async_copy_global_to_shared=_copy)
    names["warpgroup_mma"] = _multiply
    names["warpgroup_mma_wait"] = _wait_for_products
    names["fence_async_shared"] = _fence
    return names
