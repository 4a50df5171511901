"""GPUs that keep nothing but the order of their work: torch.cuda, CuPy and Triton as used here."""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.execution.profile import StepProfile
from tandem.engine.step.launched import LaunchedStep
from tandem.kernels import arrivals, tuned
from tandem.kernels.reference import norm
from tandem.transfer import cuda_context, loopback, mix64
from tandem.transfer.agents.agent import TransferAgent
from tests.stream_order.clocks import CELL_BYTES, COLLECTION, HOST, Memory, Order
from tests.stream_order.tensors import DeviceTensor, Graph, Operations, Stream, _index

NUM_DEVICES = 2
POLLS = 2  # an event's first answers, which say that it has not happened
LOST = "CUDA error: an illegal memory access was encountered"


class Gpus:
    """The fake of one test; `order` has its verdicts."""

    def __init__(self) -> None:
        self.order = order = Order()
        self.streams: dict[torch.device, list[Stream]] = {}
        self.lost: set[torch.device] = set()
        self.transfers: list[object] = []
        self.on_synchronize: Callable[[], None] = lambda: None  # work that a device has yet to do
        self.operations = Operations(order, self.stream_of)
        Operations.current = self.operations
        for index in range(NUM_DEVICES):
            self.stream(torch.device("cuda", index), "the default stream")

    def stream(self, device: torch.device, name: str) -> Stream:
        known = self.streams.setdefault(device, [])
        known.append(Stream(self.order, device, f"{name} {len(known)} of {device}"))
        return known[-1]

    @property
    def device(self) -> torch.device:
        """The calling thread's current device."""
        device: torch.device = getattr(self.order.of_thread, "device", torch.device("cuda", 0))
        return device

    def stream_of(self, device: torch.device) -> Stream:
        self.check(device)
        current: dict[torch.device, Stream] = self._currents()
        return current.get(device) or self.streams[device][0]

    def _currents(self) -> dict[torch.device, Stream]:
        if not hasattr(self.order.of_thread, "streams"):
            self.order.of_thread.streams = {}
        currents: dict[torch.device, Stream] = self.order.of_thread.streams
        return currents

    def check(self, device: torch.device) -> None:
        if device in self.lost:
            raise RuntimeError(LOST)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make a stream and its device the calling thread's."""
        currents, thread = self._currents(), self.order.of_thread
        before, device = currents.get(stream.device), self.device
        currents[stream.device], thread.device = stream, stream.device
        try:
            yield
        finally:
            thread.device = device
            if before is None:
                del currents[stream.device]
            else:
                currents[stream.device] = before

    def synchronize(self, device: torch.device) -> None:
        self.check(device)
        self.on_synchronize()
        self.order.wait("device", "synchronize of a device")
        for stream in self.streams[device]:
            self.order.follow(HOST, self.order.now(stream.agent))

    def allocate(self, device: torch.device, num_bytes: int) -> DeviceTensor:
        """Return memory that no allocator hands out again, as cudaMalloc does."""
        inner = torch.zeros(num_bytes, dtype=torch.uint8)
        storage = inner.untyped_storage()
        return DeviceTensor(inner, Memory(self.order, storage, None), device)

    def run_kernel(self, run: Callable[[], None], name: str, tensors: list[DeviceTensor]) -> None:
        """Run a Triton kernel; note each byte that it reads and writes."""
        device = tensors[0].device
        stream = self.stream_of(device)
        if any(each.device != device for each in tensors) or device != self.device:
            self.order.judge("launch on another device", f"{name} of tensors of {device}")

        def once() -> None:
            seen = _Accesses()
            with self.order.lock, seen.watching():  # Triton interprets one kernel at a time
                run()
            memories = list({id(each.memory): each.memory for each in tensors}.values())
            uses = [_uses(memories, of) for of in (seen.reads, seen.writes)]
            self.order.act(stream.agent, name, *uses)

        once()
        self.operations.node(once)


class _Accesses:
    """The addresses that an interpreted kernel uses."""

    def __init__(self) -> None:
        self.reads: list[Any] = []
        self.writes: list[Any] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        real = interpreter._interpreter

        def load(ptrs: Any, mask: Any, other: Any, dtype: Any) -> Any:
            self.reads.append((_chosen(ptrs, mask), np.dtype(dtype).itemsize))
            return real.load(ptrs, mask, other, dtype)

        def store(ptrs: Any, value: Any, mask: Any) -> Any:
            self.writes.append((_chosen(ptrs, mask), np.asarray(value).itemsize))
            return real.store(ptrs, value, mask)

        def atomic_rmw(op: Any, ptrs: Any, value: Any, mask: Any, sem: Any) -> Any:
            self.writes.append((_chosen(ptrs, mask), np.asarray(value).itemsize))
            return real.atomic_rmw(op, ptrs, value, mask, sem)

        def atomic_cas(ptrs: Any, cmp: Any, value: Any, sem: Any) -> Any:
            self.writes.append((np.asarray(ptrs), np.asarray(value).itemsize))
            return real.atomic_cas(ptrs, cmp, value, sem)

        interpreter._interpreter = SimpleNamespace(
            load=load, store=store, atomic_rmw=atomic_rmw, atomic_cas=atomic_cas
        )
        try:
            yield
        finally:
            interpreter._interpreter = real


def _chosen(ptrs: Any, mask: Any) -> Any:
    return np.asarray(ptrs)[np.asarray(mask).astype(bool)]


def _uses(memories: list[Memory], accesses: list[Any]) -> list[tuple[Memory, Any]]:
    if not accesses:
        return []
    # The first and the last byte of each number: none is wider than two cells.
    firsts = [ptrs.astype(np.int64).ravel() for ptrs, _ in accesses]
    lasts = [first + size - 1 for first, (_, size) in zip(firsts, accesses, strict=True)]
    bytes_used = np.unique(np.concatenate(firsts + lasts))
    uses, num_found = [], 0
    for memory in memories:
        mine = bytes_used[
            (bytes_used >= memory.base) & (bytes_used < memory.base + memory.num_bytes)
        ]
        num_found += len(mine)
        if len(mine):
            uses.append((memory, np.unique((mine - memory.base) // CELL_BYTES)))
    assert num_found == len(bytes_used), "a kernel uses memory of none of its tensors"
    return uses


def fake_torch_cuda(gpus: Gpus) -> dict[str, Any]:
    """Return the names of torch.cuda that are replaced."""
    order = gpus.order

    class CudaStream:
        def __init__(self, device: Any = None, priority: int = 0) -> None:
            self.device = _index(torch.device(device)) if device is not None else gpus.device
            self.of = gpus.stream(self.device, "stream")

        def synchronize(self) -> None:
            gpus.check(self.device)
            order.wait("stream", "synchronize of a stream")
            order.follow(HOST, order.now(self.of.agent))

        def query(self) -> bool:
            gpus.check(self.device)
            return False

        def wait_event(self, event: Any) -> None:
            order.follow(self.of.agent, event.clock)

        def wait_stream(self, stream: Any) -> None:
            order.follow(self.of.agent, order.now(stream.of.agent))

        def record_event(self, event: Any = None) -> Any:
            event = event or CudaEvent()
            event.record(self)
            return event

    def wrapped(stream: Stream) -> CudaStream:
        made = CudaStream.__new__(CudaStream)
        made.device, made.of = stream.device, stream
        return made

    class CudaEvent:
        def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
            self.clock: dict[int, int] = {}
            self.num_polls = 0
            self.device = gpus.device

        def record(self, stream: CudaStream | None = None) -> None:
            of = stream.of if stream is not None else gpus.stream_of(gpus.device)
            self.device, self.num_polls = of.device, 0
            self.clock = order.now(of.agent)

        def wait(self, stream: CudaStream | None = None) -> None:
            of = stream.of if stream is not None else gpus.stream_of(gpus.device)
            order.follow(of.agent, self.clock)

        def query(self) -> bool:
            gpus.check(self.device)
            self.num_polls += 1
            if self.num_polls <= POLLS:
                return False
            order.follow(HOST, self.clock)
            return True

        def synchronize(self) -> None:
            gpus.check(self.device)
            order.wait("event", "synchronize of an event")
            order.follow(HOST, self.clock)

        def elapsed_time(self, end: Any) -> float:
            return 1.0

    class CudaGraph:
        def __init__(self) -> None:
            self.of = Graph()

        def replay(self) -> None:
            for node in self.of.nodes:
                with torch._C._DisableTorchDispatch():
                    node()

    @contextlib.contextmanager
    def graph(cuda_graph: CudaGraph, *, stream: CudaStream, **_: Any) -> Iterator[None]:
        gpus.synchronize(stream.device)
        with gpus.on(stream.of):
            order.of_thread.graph = cuda_graph.of
            try:
                yield
            finally:
                order.of_thread.graph = None

    def set_device(device: Any) -> None:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        order.of_thread.device = _index(device)

    @contextlib.contextmanager
    def device_context(device: Any) -> Iterator[None]:
        before = gpus.device
        set_device(device)
        try:
            yield
        finally:
            order.of_thread.device = before

    def device_of(device: Any) -> torch.device:
        if device is None:
            return gpus.device
        return _index(torch.device("cuda", device) if isinstance(device, int) else device)

    gib = 2**30
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: NUM_DEVICES,
        "Stream": CudaStream,
        "Event": CudaEvent,
        "CUDAGraph": CudaGraph,
        "graph": graph,
        "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: getattr(order.of_thread, "graph", None) is not None,
        "stream": lambda stream: gpus.on(stream.of),
        "current_stream": lambda device=None: wrapped(gpus.stream_of(device_of(device))),
        "synchronize": lambda device=None: gpus.synchronize(device_of(device)),
        "set_device": set_device,
        "device": device_context,
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=2),
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (gib, gib),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
    }


def fake_cupy(gpus: Gpus) -> ModuleType:
    """Return CuPy, as far as a KV pool is made with it; memory passes through DLPack as it is."""
    cupy: Any = ModuleType("cupy")
    cupy.uint8 = "uint8"
    cupy.ndarray = lambda shape, dtype, memptr: memptr
    cupy.cuda = SimpleNamespace(
        Device=torch.cuda.device,
        Memory=lambda num_bytes: gpus.allocate(gpus.device, num_bytes),
        MemoryPointer=lambda memory, offset: memory,
    )
    return cupy  # type: ignore[no-any-return]


def _clear_caches() -> None:
    """Forget what the program keeps for each device: the devices of another test are others."""
    for cached in (
        arrivals.arrivals,
        tuned._count_multiprocessors,
        mix64._stream,
        mix64._device_parts,
        norm._constant,
    ):
        cached.cache_clear()


@contextlib.contextmanager
def use_gpus() -> Iterator[Gpus]:
    """Let the program find GPUs, in all threads that it starts; interpret its kernels."""
    gpus = Gpus()
    torch._C._ensureCUDADeviceGuardSet()
    _clear_caches()
    with pytest.MonkeyPatch.context() as patch, gpus.operations:
        for name, value in fake_torch_cuda(gpus).items():
            patch.setattr(torch.cuda, name, value)
        patch.setitem(sys.modules, "cupy", fake_cupy(gpus))
        patch.setattr(torch.utils.dlpack, "from_dlpack", lambda tensor: tensor)
        patch.setattr(cuda_context, "has_cuda_context", lambda: True)
        # Nothing is built here.
        patch.setattr(ModelRunner, "_prebuild", lambda *_: None)
        patch.setattr(StepProfile, "warm_up", lambda *_: None)
        # Whether integers overflow is judged by the tests of kernels.
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        _patch_torch(gpus, patch)
        _patch_products(patch)
        _patch_threads(gpus, patch)
        _patch_program(gpus, patch)
        yield gpus
    _clear_caches()


def _patch_torch(gpus: Gpus, patch: pytest.MonkeyPatch) -> None:
    operations, make = gpus.operations, torch.tensor
    reads = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy")}

    def tensor(data: Any, *, device: Any = None, pin_memory: bool = False, **options: Any) -> Any:
        made = make(data, **options)
        made = made.pin_memory() if pin_memory else made
        return made if device is None else made.to(device)

    def tolist(self: torch.Tensor) -> Any:
        operations.touch(self, "tolist", writes=False)
        return reads["tolist"](self.inner if isinstance(self, DeviceTensor) else self)

    def numpy(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        operations.touch(self, "numpy", writes=True)  # what is done with it is not seen
        return reads["numpy"](self, *args, **options)

    patch.setattr(torch, "tensor", tensor)
    patch.setattr(torch.Tensor, "tolist", tolist, raising=False)
    patch.setattr(torch.Tensor, "numpy", numpy, raising=False)
    run = interpreter.InterpretedFunction.run

    def run_kernel(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        ours: list[DeviceTensor] = []

        def unwrap(value: Any) -> Any:
            if isinstance(value, TensorDescriptor):
                value.base = unwrap(value.base)
            elif isinstance(value, DeviceTensor):
                ours.append(value)
                return value.inner
            return value

        args = tuple(map(unwrap, args))

        def launch() -> None:
            with torch._C._DisableTorchDispatch():
                run(self, *args, grid=grid, warmup=warmup, **options)

        gpus.run_kernel(launch, self.fn.__name__, ours)

    patch.setattr(interpreter.InterpretedFunction, "run", run_kernel)


def _patch_products(patch: pytest.MonkeyPatch) -> None:
    """Let products of bfloat16 multiply numbers: Triton's interpreter multiplies their bits."""
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        numbers = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, widened(a), widened(b), *others)

    patch.setattr(builder, "create_dot", create_dot)


def _patch_threads(gpus: Gpus, patch: pytest.MonkeyPatch) -> None:
    run = threading.Thread.run

    def run_within(self: threading.Thread) -> None:
        with gpus.operations:
            run(self)

    patch.setattr(threading.Thread, "run", run_within)


def _patch_program(gpus: Gpus, patch: pytest.MonkeyPatch) -> None:
    """Say where the program may wait for a GPU."""
    order = gpus.order

    def within(owner: Any, name: str, region: str, *allowed: str) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            with order.waiting_only_for(region, *allowed):
                return real(*args, **kwargs)

        patch.setattr(owner, name, replaced)

    within(ModelRunner, "launch", "a launch")
    within(LaunchedStep, "tokens", COLLECTION, "event")
    within(TransferAgent, "_run_commands", "the transfer thread")
    within(TransferAgent, "_poll", "the transfer thread")
    _patch_transport(gpus, patch)


def _patch_transport(gpus: Gpus, patch: pytest.MonkeyPatch) -> None:
    """Let each transfer of the fake transport be work beside the host, from its post on."""
    order, agents, transfers = gpus.order, dict[int, int](), loopback.PendingTransfer
    make, copy, finish = transfers.__init__, transfers.copy, transfers.finish

    def made(self: Any, source: Any, *args: Any, **options: Any) -> None:
        make(self, source, *args, **options)
        stream = gpus.stream(torch.device("cuda", source.grid.device_id), "transport")
        agents[id(self)] = stream.agent
        gpus.transfers.append(self)  # so that its id stays its own

    def copied(self: Any, num_bytes: int | None = None) -> None:
        copy(self, num_bytes)
        near, far = self.source.grid, self.source.fabric.transports[self.target].grid
        for ours, theirs, length in self.pieces:
            uses = []
            for address in (near.base_address + ours, far.base_address + theirs):
                memory = order.memory_at(address)
                assert memory is not None
                uses.append([(memory, memory.cells_at(address, length))])
            reads, writes = uses if self.operation == "WRITE" else uses[::-1]
            order.act(agents[id(self)], f"a {self.operation}", reads, writes, begun=True)

    def finished(self: Any) -> None:
        order.follow(HOST, order.now(agents[id(self)]))
        finish(self)

    patch.setattr(transfers, "__init__", made)
    patch.setattr(transfers, "copy", copied)
    patch.setattr(transfers, "finish", finished)
