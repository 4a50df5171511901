"""Tensors of a GPU that is not there: torch computes on the CPU, and every operation is noted."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.stream_order.clocks import HOST, Memory, Order, Use

# Operations whose results have a size, or a value, that the host must know.
_LOOKED_AT = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount",
    "equal", "repeat_interleave",
}  # fmt: skip
_UNWRITTEN = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
_OURS = ("cuda", "meta")
CPU = torch.device("cpu")


class DeviceTensor(torch.Tensor):
    """A tensor that says of itself that it is on a GPU, over one on the CPU."""

    inner: torch.Tensor
    memory: Memory
    on: torch.device
    is_cuda = True
    is_meta = is_cpu = False
    device = property(lambda self: self.on)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, memory: Memory, device: torch.device) -> "DeviceTensor":
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",  # to torch's C++, which has no CUDA
        )
        made.inner, made.memory, made.on = inner, memory, device
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Operations.current.run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def use(self) -> Use:
        return self.memory, self.memory.cells_of(self.inner)


class Stream:
    """A CUDA stream."""

    def __init__(self, order: Order, device: torch.device, name: str) -> None:
        self.device = device
        self.agent = order.agent(name)


Node = Callable[[], None]


class Graph:
    """What was launched within a capture, to be launched again."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.kept: list[object] = []


@functools.cache
def find_operators() -> None:
    """Make the Python object of each of torch's operators before threads look for them.

    Two threads that ask for one at once both make it. The dispatcher keeps the address of the
    one it got first, torch.ops keeps the other, and once the first is collected, the next call of
    that operator under a mode reads freed memory.
    """
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = name.partition("::")
        name, _, overload = name.partition(".")
        getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


class Operations(TorchDispatchMode):
    """Runs torch's operations, for the threads that enter it.

    `stream_of` returns the calling thread's stream on a device.
    """

    current: "Operations"

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, order: Order, stream_of: Callable[[torch.device], Stream]) -> None:
        super().__init__()
        find_operators()
        self.order = order
        self.stream_of = stream_of
        self.pinned: dict[int, tuple[torch.UntypedStorage, Memory]] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        # What is made in inference mode could be changed within it alone.
        with torch.inference_mode(False), torch.no_grad():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.removeprefix("aten::")
        leaves = tree_leaves((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        gpu = [each for each in leaves if isinstance(each, torch.device) and each.type in _OURS]
        ours = [each for each in tensors if isinstance(each, DeviceTensor)]
        if name == "is_pinned":
            return self.pin_of(args[0]) is not None
        if name in ("pin_memory", "_pin_memory"):
            return self.pin(args[0].clone())
        pins = bool(kwargs.get("pin_memory"))
        if not ours and not gpu and not pins:
            if self.pinned:
                self._on_host(func, name, args, kwargs, tensors)
            return func(*args, **kwargs)
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            return self._copy(func, name, args, kwargs)
        if pins:
            return self.pin(func(*args, **{**kwargs, "pin_memory": False}))
        return self._launch(func, name, args, kwargs, gpu, ours)

    # Work of the host.

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor's memory one that GPUs copy from and to by themselves."""
        if getattr(self.order.of_thread, "graph", None) is not None:
            self.order.judge("host memory in a capture", "pinned memory is allocated")
        storage = tensor.untyped_storage()
        self.pinned[storage.data_ptr()] = storage, Memory(self.order, storage, None)
        return tensor

    def pin_of(self, tensor: torch.Tensor) -> Memory | None:
        known = self.pinned.get(tensor.untyped_storage().data_ptr())
        return None if known is None else known[1]

    def touch(self, tensor: torch.Tensor, what: str, *, writes: bool) -> None:
        """Note that the host uses a tensor without an operation of torch."""
        if isinstance(tensor, DeviceTensor):
            self.order.wait("copy", f"{what} of a tensor on a GPU")
        elif (memory := self.pin_of(tensor)) is not None:
            use = [(memory, memory.cells_of(tensor))]
            self.order.act(HOST, what, *(([], use) if writes else (use, [])))

    def _on_host(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Any]) -> None:
        if func.is_view or not any(self.pin_of(each) is not None for each in tensors):
            return
        writes = _written(func, args, kwargs)
        for each in tensors:
            self.touch(each, name, writes=any(each is written for written in writes))

    # Work of a GPU.

    def _launch(
        self, func: Any, name: str, args: Any, kwargs: Any, gpu: list[Any], ours: list[Any]
    ) -> Any:
        device = ours[0].on if ours else _index(gpu[0])
        stream = self.stream_of(device)
        if any(each.on != device for each in ours):
            raise RuntimeError("Expected all tensors to be on the same device")
        by_mask = name.startswith("index") and any(
            each.dtype in (torch.bool, torch.uint8)
            for each in tree_leaves(args[1:2])
            if isinstance(each, torch.Tensor)
        )
        is_counted = name.endswith("_grouped_mm") and ours[0].dtype != torch.bfloat16
        if name in _LOOKED_AT or by_mask or is_counted:
            self.order.wait("copy", f"a result of {name}")
        known = {id(each.inner): each for each in ours}
        written = [e for e in _written(func, args, kwargs) if isinstance(e, DeviceTensor)]
        result = self._result(func, args, kwargs)
        fresh: list[DeviceTensor] = []

        def wrap(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in known:
                return known[id(value)]
            made = self.wrap(value, device, stream, [each.memory for each in ours])
            if all(made.memory is not each.memory for each in ours):
                fresh.append(made)
            return made

        result = tree_map(wrap, result)
        if written or (fresh and name not in _UNWRITTEN) or name in _LOOKED_AT:
            self._act(stream, name, ours, [*written, *fresh])
            self.node(lambda: self._again(stream, func, name, args, kwargs, ours, written, fresh))
        return result

    def wrap(
        self, inner: torch.Tensor, device: torch.device, stream: Stream, known: list[Memory]
    ) -> DeviceTensor:
        """Put a tensor on a device, in memory of its own or in that which it shares with others."""
        storage = inner.untyped_storage()
        for memory in known:
            if memory.base == storage.data_ptr():
                return DeviceTensor(inner, memory, device)
        return DeviceTensor(inner, Memory(self.order, storage, stream.agent), device)

    def _act(self, stream: Stream, name: str, reads: list[Any], writes: list[Any]) -> None:
        uses = [[each.use() for each in of if each.numel()] for of in (reads, writes)]
        self.order.act(stream.agent, name, *uses)

    def _again(
        self, stream: Stream, func: Any, name: str, args: Any, kwargs: Any,
        ours: list[Any], written: list[Any], fresh: list[Any],
    ) -> None:  # fmt: skip
        result = self._result(func, args, kwargs)
        outs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        if fresh:
            for kept, each in zip(fresh, outs, strict=True):
                kept.inner.copy_(each)
        self._act(stream, name, ours, [*written, *fresh])

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(self._unwrap, args), tree_map(self._unwrap, kwargs)
        if func is torch.ops.aten.histc.default:  # of integers only on GPUs
            return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        return func(*args, **kwargs)

    def node(self, again: Node) -> None:
        """Keep what was launched for the graph that this thread captures, if it does."""
        if (graph := getattr(self.order.of_thread, "graph", None)) is not None:
            graph.nodes.append(again)

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Copy between the host and a GPU, or within one of them."""
        source = args[1] if name == "copy_" else args[0]
        target = args[0] if name == "copy_" else None
        if target is not None:
            to = target.device
            waits_not = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        else:
            to = kwargs.get("device") or source.device
            to = source.device if to.type == "meta" else to  # of another tensor, as `type_as` asks
            waits_not = kwargs.get("non_blocking")
        if to.type == source.device.type == "cuda":
            gpu = [_index(to)]
            return self._launch(
                func, name, args, kwargs, gpu, [e for e in args if isinstance(e, DeviceTensor)]
            )
        to = _index(to) if to.type == "cuda" else to
        device = to if to.type == "cuda" else source.device
        stream = self.stream_of(device)
        options = {
            key: value for key, value in kwargs.items() if key not in ("device", "non_blocking")
        }
        if target is None:
            inner = _inner(source)
            made = func(inner, **options, device=CPU)
            made = made.clone() if made is inner else made
            if to.type == "cuda":
                target = self.wrap(made, to, stream, [])
            else:
                target = self.pin(made) if waits_not and made.numel() else made
        else:
            _inner(target).copy_(_inner(source))
        if not source.numel():
            return target
        on_host = target if isinstance(source, DeviceTensor) else source
        pinned = self.pin_of(on_host)
        self._transfer(stream, source, target, pinned)
        if pinned is None:
            self.order.wait("copy", "a copy with memory that is not pinned")
            self.order.follow(HOST, self.order.now(stream.agent))
        elif not waits_not:
            self.order.wait("copy", "a blocking copy")
            self.order.follow(HOST, self.order.now(stream.agent))
        if getattr(self.order.of_thread, "graph", None) is not None:
            self.order.judge("host memory in a capture", "a copy reads or writes it at each replay")
        return target

    def _transfer(self, stream: Stream, source: Any, target: Any, pinned: Memory | None) -> None:
        uses: list[list[Use]] = []
        for each in (source, target):
            if isinstance(each, DeviceTensor):
                uses.append([each.use()])
            else:
                uses.append([] if pinned is None else [(pinned, pinned.cells_of(each))])
        self.order.act(stream.agent, "copy", *uses)

    def _unwrap(self, value: Any) -> Any:
        if isinstance(value, DeviceTensor):
            return value.inner
        if isinstance(value, torch.device) and value.type in _OURS:
            return CPU
        if isinstance(value, torch.Tensor) and value.dim():
            raise RuntimeError("Expected all tensors to be on the same device, but found cpu")
        return value


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.inner if isinstance(tensor, DeviceTensor) else tensor


def _index(device: torch.device) -> torch.device:
    return torch.device("cuda", device.index or 0)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that an operation changes in place."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        found += [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    return found
