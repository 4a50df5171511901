"""The program with one wait, one record or one pinned copy less, or with a fault it once had."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

Scene = Literal[
    "steps", "masks", "mixture", "handoff", "quarantine", "failed_launch", "lost", "builds"
]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A function in which one passage is replaced, and the verdict that it earns in a scene."""

    where: str  # module:function, under tandem
    old: str
    new: str
    scene: Scene
    verdict: str

    @property
    def name(self) -> str:
        return f"{self.where.partition(':')[2]} without {' '.join(self.old.split())}"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The function is this mutant within, for all who have imported it."""
        module_name, _, path = self.where.partition(":")
        module = importlib.import_module(f"tandem.{module_name}")
        function: Any = inspect.unwrap(reduce(getattr, path.split("."), module))
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, (
            f"{self.where} has {self.old!r} {source.count(self.old)} times"
        )
        tree = ast.parse(source.replace(self.old, self.new))
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
        definition.decorator_list.clear()
        ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
        made: dict[str, Any] = {}
        exec(compile(tree, function.__code__.co_filename, "exec"), module.__dict__, made)
        code, function.__code__ = function.__code__, made[definition.name].__code__
        try:
            yield
        finally:
            function.__code__ = code


def _mutant(where: str, old: str, new: str, scene: Scene, verdict: str) -> Mutant:
    return Mutant(where, old, new, scene, verdict)


RUNNER = "engine.execution.model_runner"
GRAPHS = "engine.step.decode_graphs"
LAUNCHED = "engine.step.launched"
UPLOAD = "engine.batch.upload"
MASKS = "engine.batch.masks"
READERS = "engine.weights.weight_readers"
SUMS, ON_GPU = "transfer.checksum", "transfer.mix64"
IN_LAUNCH = "host wait in a launch"
IN_TRANSFER = "host wait in the transfer thread"
ONE_BUFFER = """
    if device.type != "cuda":
        return flat
    if not hasattr(torch.cuda.Stream, "buffer"):
        torch.cuda.Stream.buffer = torch.empty(4096, dtype=torch.int64).pin_memory()
    return torch.cuda.Stream.buffer[: len(flat)].copy_(flat)
    return flat"""

MUTANTS = [
    # A step.
    _mutant(
        f"{LAUNCHED}:CudaTiming.wait", "self._end.synchronize()", "", "steps", "unordered read"
    ),
    _mutant(f"{LAUNCHED}:CudaTiming.stop", "self._end.record()", "pass", "steps", "unordered read"),
    _mutant(f"{UPLOAD}:upload", ", non_blocking=True", "", "steps", IN_LAUNCH),
    _mutant(f"{UPLOAD}:on_host", "flat.pin_memory()", "flat", "steps", IN_LAUNCH),
    _mutant(f"{UPLOAD}:download", ", non_blocking=True", "", "steps", IN_LAUNCH),
    _mutant(f"{UPLOAD}:download", ", pin_memory=True", "", "steps", IN_LAUNCH),
    _mutant(
        f"{UPLOAD}:on_host",
        "return flat.pin_memory()",
        ONE_BUFFER,
        "steps",
        "unordered write",
    ),
    # Graphs.
    _mutant(f"{GRAPHS}:DecodeGraphs.follow", ", non_blocking=True", "", "steps", IN_LAUNCH),
    _mutant(
        "engine.batch.batch:build_decode_batch",
        "ends = positions + 1",
        "ends = positions + torch.ones(1).pin_memory().to(inputs.device, non_blocking=True).long()",
        "steps",
        "host memory in a capture",
    ),
    _mutant(
        "engine.batch.batch:build_decode_batch",
        "ends = positions + 1",
        "ends = positions + torch.tensor([1], device=inputs.device)",
        "steps",
        "wait in a capture",
    ),
    # Masks, and an answer that waits for one (which once made the host wait for all steps).
    _mutant(
        f"{MASKS}:MaskedRows.tensors",
        "rows.pin_memory().to(device, non_blocking=True)",
        "rows.to(device)",
        "masks",
        IN_LAUNCH,
    ),
    _mutant(
        f"{MASKS}:MaskedRows.tensors",
        "bits.pin_memory().to(device, non_blocking=True)",
        "bits.pin_memory().to(device)",
        "masks",
        IN_LAUNCH,
    ),
    _mutant(
        "engine.step.device_loss:_noticing_cuda_loss",
        "except TandemError:\n        raise\n    except",
        "except",
        "masks",
        "host wait in the collection of a step",
    ),
    # A mixture of experts, whose counts torch once looked at on chips, and in dtypes, but for two.
    _mutant(
        "engine.transformers_models.generic_attention:multiplies_groups",
        " or dtype != torch.bfloat16",
        "",
        "mixture",
        "wait in a capture",
    ),
    _mutant(
        "engine.transformers_models.generic_parts:swap_experts",
        "not pack_experts(module, kernels)",
        "False",
        "mixture",
        "host wait in a launch",
    ),
    # Weights.
    _mutant(
        f"{READERS}:CudaStagingDevice.copy",
        "event.record(self._stream)",
        "",
        "steps",
        "unordered read",
    ),
    _mutant(f"{READERS}:StagedLane.finish", "self._wait(half)", "pass", "steps", "unordered read"),
    _mutant(f"{READERS}:StagedLane.fill", "self._wait(my_half)", "", "steps", "unordered write"),
    # A runner that is ready, or whose step has failed.
    _mutant(
        f"{RUNNER}:ModelRunner.launch",
        "self._stream.synchronize()",
        "pass",
        "failed_launch",
        "unordered write",
    ),
    # Layers that are sent while their step is computed.
    _mutant(f"{RUNNER}:_announce_layers", "event.record()", "", "handoff", "unordered read"),
    _mutant(
        f"{RUNNER}:_announce_layers",
        "on_layers(num_layers, event)",
        "on_layers(num_layers, None)",
        "handoff",
        "unordered read",
    ),
    _mutant(
        "engine.step.layer_stream:LayerStream._announce",
        "num_layers, event)",
        "num_layers, None)",
        "handoff",
        "unordered read",
    ),
    _mutant(
        "transfer.agents.group:TransferGroup.write",
        "after=order.after",
        "after=None",
        "handoff",
        "unordered read",
    ),
    _mutant(
        "transfer.handoff.writer:BlockWriter._write",
        "computed.event,",
        "None,",
        "handoff",
        "unordered read",
    ),
    # Checksums.
    _mutant(
        f"{SUMS}:checksum_steps",
        "while after is not None and not after.query():",
        "while False:",
        "handoff",
        "unordered read",
    ),
    _mutant(
        f"{SUMS}:checksum_steps",
        "while after is not None and not after.query():",
        "while after is not None and after.synchronize():",
        "handoff",
        IN_TRANSFER,
    ),
    _mutant(f"{ON_GPU}:mix64_steps", "done.record(stream)", "", "handoff", "unordered read"),
    _mutant(
        f"{ON_GPU}:mix64_steps",
        "while not done.query():",
        "while False:",
        "handoff",
        "unordered read",
    ),
    _mutant(
        f"{ON_GPU}:mix64_steps",
        "while not done.query():",
        "while done.synchronize():",
        "handoff",
        IN_TRANSFER,
    ),
    _mutant(
        f"{ON_GPU}:mix64_steps",
        "ids.to(pool.device, non_blocking=True)",
        "ids.to(pool.device)",
        "handoff",
        IN_TRANSFER,
    ),
    _mutant(
        f"{ON_GPU}:mix64_steps",
        "dtype=torch.int64, pin_memory=True",
        "dtype=torch.int64",
        "handoff",
        IN_TRANSFER,
    ),
    _mutant(
        f"{ON_GPU}:mix64_steps",
        "copy_(sums, non_blocking=True)",
        "copy_(sums)",
        "handoff",
        IN_TRANSFER,
    ),
    _mutant(
        f"{ON_GPU}:mix64_steps",
        "dtype=sums.dtype, pin_memory=True",
        "dtype=sums.dtype",
        "handoff",
        IN_TRANSFER,
    ),
    _mutant(
        f"{ON_GPU}:mix64_steps",
        "with torch.cuda.stream(stream):",
        "if True:",
        "handoff",
        "unordered read",
    ),
    _mutant(
        "kernels.checksum:part_table",
        "to(device, non_blocking=True)",
        "to(device)",
        "handoff",
        IN_TRANSFER,
    ),
    _mutant(
        "kernels.checksum:part_table",
        ', pin_memory=device.type == "cuda"',
        "",
        "handoff",
        IN_TRANSFER,
    ),
    # Writes that are given up.
    _mutant(
        "transfer.cuda_context:begin_settling",
        "torch.cuda.synchronize(device_id)",
        "pass",
        "quarantine",
        "unordered read",
    ),
    _mutant(
        "transfer.agents.reactor:TransferReactor._drop",
        "self._settle is not None",
        "False",
        "quarantine",
        "unordered read",
    ),
    # A GPU that is lost.
    _mutant(
        "engine.step.device_loss:_noticing_cuda_loss",
        'raise DeviceLostError(f"{device} is lost: {error}") from error',
        "pass",
        "lost",
        "AssertionError",
    ),
]

# Kernels are built for it, which nothing else here does: tests/kernels/test_warm_up.py applies it.
BUILDS_BY_A_HOOK = _mutant(
    "worker.kernel_builds:listen_to_builds",
    "triton.knobs.compilation.listener = None if on_build is None else listener",
    "triton.knobs.runtime.jit_post_compile_hook = lambda **_: on_build('a kernel was built')",
    "builds",
    "TypeError",
)
