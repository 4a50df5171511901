"""What a worker does on GPUs, each scene with the program's own code from end to end."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.execution.model_code import choose_model_config
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import LayerProgress, Sequence, layer_boundaries
from tandem.engine.step.outcome import DeviceLostError, SampledToken
from tandem.engine.transformers_models import generic_model
from tandem.engine.transformers_models.generic_weights import build_generic
from tandem.runtime.errors import InternalError, TransferError
from tandem.runtime.tracing.timeline import Timeline
from tandem.runtime.wire.cluster_messages import Instance
from tandem.runtime.wire.handoff_messages import Claim, Claimed, FirstToken
from tandem.runtime.wire.messages import SamplingParams, StopConditions
from tandem.transfer.agents.group import TransferGroup, WriteOrder
from tandem.transfer.config import TransferConfig
from tandem.transfer.handoff.prefill import PrefillHandoff
from tandem.transfer.handoff.receiver import BlockOwner, HandoffReceiver
from tandem.transfer.handoff.server import HandoffServer
from tandem.transfer.handoff.writer import BlockWriter, ComputedBlocks
from tandem.transfer.layout import KvLayout
from tandem.transfer.loopback import PROCESS_FABRIC
from tests.stream_order.gpu import Gpus

Answers = dict[str, list[int]]
GREEDY: dict[str, Any] = {"temperature": 0}
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 1, "prompt_logprobs": True},
    {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    {"temperature": 0.7, "repetition_penalty": 1.2, "logprobs": 3, "seed": 5},
    GREEDY,
]
BLOCK_SIZE = 4
LEASE_MS = 600_000
LOOPBACK = TransferConfig(backend="loopback", write_timeout_s=0.1)


def make_engine(folder: Path, device: str, **options: Any) -> Engine:
    """An engine over a pool of few blocks, which are soon used again."""
    config = EngineConfig(**(_settings(folder, device) | options))
    return Engine(config, ModelRunner(config))


def _settings(folder: Path, device: str) -> dict[str, Any]:
    return {
        "model": str(folder), "device": device, "dtype": "float32", "block_size": BLOCK_SIZE,
        "num_blocks": 16, "max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 8,
        "threads": 1,
    }  # fmt: skip


def sequence(
    name: str, num_tokens: int, sampling: dict[str, Any] = GREEDY, **changes: Any
) -> Sequence:
    token_ids = [5 + (3 * len(name) + 7 * position) % 90 for position in range(num_tokens)]
    stop = StopConditions(max_tokens=3, ignore_eos=True)
    return Sequence(name, token_ids, num_tokens, SamplingParams(**sampling), stop, **changes)


def run(engine: Engine, *seqs: Sequence) -> Answers:
    """Serve sequences to their ends; return their tokens."""
    answers: Answers = {seq.request_id: [] for seq in seqs}
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            answers[output.request_id] += output.token_ids
    return answers


def steps(folder: Path, device: str, **options: Any) -> Answers:
    """Prompts in chunks, then decode steps ahead of the host, most of them replayed."""
    engine = make_engine(folder, device, **options)
    lengths = (11, 2, 5, 3)
    return run(engine, *map(sequence, "abcd", lengths, REQUESTS))


@dataclass(frozen=True, slots=True)
class ByTransformers:
    """A model by transformers' code, loaded where there is no GPU."""

    folder: Path
    config: ModelConfig
    model: Any
    siblings: list[tuple[str, ...]]

    @classmethod
    def load(cls, folder: Path, dtype: str) -> "ByTransformers":
        config = replace(choose_model_config(folder, "transformers"), dtype=dtype)
        built = build_generic(folder, getattr(torch, dtype), torch.device("cpu"))
        return cls(folder, config, *built)

    def make_engine(self, device: str, **options: Any) -> Engine:
        def build(_folder: str, _dtype: torch.dtype, on: torch.device) -> Any:
            return deepcopy(self.model).to(on), self.siblings

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generic_model, "build_generic", build)
            settings = _settings(self.folder, device) | {"dtype": self.config.dtype} | options
            config = EngineConfig(**settings, model_impl="transformers")
            return Engine(config, ModelRunner(config, model_config=self.config))


def mixture(model: ByTransformers, device: str) -> Answers:
    """Prompts and decode steps of a mixture, in a dtype of which no GPU multiplies groups."""
    return run(model.make_engine(device), sequence("a", 5), sequence("b", 3))


class LateMasks:
    """A matcher of even tokens whose masks are not ready when they are first waited for."""

    num_tokens = 0

    def __init__(self) -> None:
        self.forced: list[int] = []
        self._is_late = True

    def begin(self, new_tokens: list[int]) -> None:
        self.num_tokens += len(new_tokens)

    def wait(self, timeout_s: float | None) -> bool:
        self._is_late = not self._is_late
        return self._is_late

    def mask(self) -> npt.NDArray[np.int32]:
        return np.full(9, 0x55555555, np.int32)


def masks(folder: Path, device: str) -> Answers:
    """An answer under a grammar that is late, beside another one."""
    bound = sequence("bound", 3, matcher=LateMasks())
    return run(make_engine(folder, device), sequence("free", 3), bound)


class Owner:
    """The owner of a prompt's blocks that a handoff fills: an engine, which then decodes it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def defers(self, prefill_instance: str) -> bool:
        return False

    def on_admitted(self, first: FirstToken | None) -> None:
        assert first is not None
        self._engine.admit("moved", SampledToken(first.token_id, None))

    def on_claimed(self, claimant: Instance) -> None:
        pass

    on_mismatch = on_given_up = on_cancelled = on_released = Mock()

    def on_ended(self) -> None:
        pass


class Ends:
    """A prefill worker's engine on one GPU and a decode worker's on another, with transports."""

    def __init__(self, folder: Path) -> None:
        self.engines = [make_engine(folder, f"cuda:{index}") for index in range(2)]
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()
        self.hear: Callable[[bytes], None] = self.heard.put_nowait
        runner = self.engines[0].runner
        model, self.layers = runner.model_config, runner.model_config.num_layers
        layout = KvLayout(self.layers, model.num_kv_heads, BLOCK_SIZE, model.head_dim, model.dtype)
        self.sender, self.receiver = (
            TransferGroup(LOOPBACK, layout, each.runner.kv_caches, name, "e1")
            for name, each in zip("pd", self.engines, strict=True)
        )

    async def __aenter__(self) -> "Ends":
        await self.sender.start(lambda rank, notice: None)
        await self.receiver.start(lambda rank, notice: self.hear(notice))
        self.link = await self.sender.connect(self.receiver.metadata())
        return self

    async def __aexit__(self, *_: object) -> None:
        PROCESS_FABRIC.held = False
        PROCESS_FABRIC.pending.clear()
        await self.sender.close()
        await self.receiver.close()

    def claimed(self, grant: Claimed, owner: BlockOwner) -> tuple[HandoffReceiver, BlockWriter]:
        """Open a handoff at the decode worker and claim it for the prefill worker."""
        server = HandoffServer(Mock(), self.receiver, LOOPBACK, {}, None)
        self.hear = partial(server.on_notification, 0)
        receiver = server.open(owner, grant, "moved", Timeline())
        receiver.machine.published()
        handoff_id, now = receiver.machine.handoff_id, time.perf_counter()
        assert receiver.claim(Claim(handoff_id, 1, "p", "e1"), Mock(), Mock())
        machine = PrefillHandoff(
            handoff_id, 1, grant, claim_sent_at=now, margin_ms=0, num_layers=self.layers,
            rank_pairs=self.link.rank_pairs,
        )  # fmt: skip
        return receiver, BlockWriter(self.sender, machine, self.link, Timeline(), Mock())

    async def write(
        self, pairs: list[tuple[int, int]], layers: range, ends: tuple[int, ...], after: Any = None
    ) -> None:
        """Write layers of blocks, and compare both sides' checksums as a decode worker does."""
        ranks, sums = self.link.rank_pairs[0], list[int]()

        def notice(checksums: Any) -> bytes:
            sums.extend(checksums)
            return b"landed"

        await self.sender.write(
            self.link, WriteOrder(ranks, layers, pairs, notice, ends, None, after)
        )
        assert await self.heard.get() == b"landed"
        remote = [block for _, block in pairs]
        assert await self.receiver.checksums(ranks, layers, remote) == sums


async def handoff(folder: Path) -> Answers:
    """A prompt in two chunks, the last written layer by layer while it is computed."""
    async with Ends(folder) as ends:
        prefill, decode = ends.engines
        # It has block 0, of which the prefill kernel reads keys past a context, and uses none.
        decode.add(sequence("other", 4))
        decode.launch()
        ours, theirs = (
            sequence("moved", 11, prefill_only=True, num_layer_groups=2),
            sequence("moved", 11),
        )
        reserved = decode.reserve(theirs)
        assert reserved is not None
        grant = Claimed(bytes(16), LEASE_MS, b"", theirs.sampling, reserved.fill, [])
        receiver, writer = ends.claimed(grant, Owner(decode))
        boundaries = layer_boundaries(ends.layers, 2)

        def write(num_tokens: int, num_layers: int, event: Any = None) -> None:
            num_blocks = 3 if num_tokens == 11 else num_tokens // BLOCK_SIZE
            blocks = ours.block_table, num_blocks, [num_layers], boundaries, event
            writer.write_ready(ComputedBlocks(*blocks))

        announced: list[LayerProgress] = []
        prefill.on_layers = announced.extend
        prefill.add(ours)
        prefill.launch()  # both chunks
        [head] = prefill.collect()
        prefill.launch()  # announces what waited for the outputs before
        write(head.num_computed_tokens, ends.layers)
        [progress] = announced
        write(progress.num_computed_tokens, progress.num_layers, progress.event)
        await writer.drain()
        [last] = prefill.collect()
        write(11, ends.layers)
        await writer.drain()
        assert not writer.machine.pinned and not writer.machine.error
        prefill.abort("moved")
        handoff_id, [token_id] = receiver.machine.handoff_id, last.token_ids
        first = FirstToken(handoff_id, 1, grant.secret, b"", token_id)
        receiver.run(receiver.machine.first_token(first))
        async with asyncio.timeout(60):
            await receiver.ended.wait()
        answers = {"moved": [token_id], "other": []}
        while decode.has_work:
            for output in decode.step():
                answers[output.request_id] += output.token_ids
        return answers


async def quarantine(gpus: Gpus, folder: Path) -> None:
    """A write that is given up too late: its blocks, on both sides, are soon others'."""

    def land() -> None:
        while PROCESS_FABRIC.pending:
            PROCESS_FABRIC.pending.pop().copy()

    async with Ends(folder) as ends:
        for engine in ends.engines:
            run(engine, sequence("warm", 2))
        gpus.on_synchronize = land  # a device has run its copies once it is idle
        PROCESS_FABRIC.held = True
        pairs = [(block, block) for block in range(16)]
        with contextlib.suppress(TransferError):
            await ends.write(pairs, range(ends.layers), (ends.layers,))
        for engine in ends.engines:
            run(engine, sequence("next", 9))
        land()  # the latest that they could


class FailingMasks(LateMasks):
    """A matcher that fails in the midst of a launch."""

    def wait(self, timeout_s: float | None) -> bool:
        raise InternalError("the grammar's thread has ended")


async def failed_launch(folder: Path) -> None:
    """A step that fails after it wrote to the pool, whose blocks are then filled from outside."""
    async with Ends(folder) as ends:
        _, decode = ends.engines
        for each in ends.engines:
            run(each, sequence("warm", 2))
        with contextlib.suppress(InternalError):
            run(decode, sequence("fails", 5, matcher=FailingMasks()))
        pairs = [(block, block) for block in range(16)]
        await ends.write(pairs, range(ends.layers), (ends.layers,))


def lost(gpus: Gpus, folder: Path) -> None:
    """A GPU that is lost with a step in flight."""
    engine = make_engine(folder, "cuda:0")
    engine.add(sequence("a", 3))
    engine.add(sequence("b", 5))
    engine.launch()
    gpus.lost.add(torch.device("cuda", 0))
    try:
        engine.collect()
    except DeviceLostError as error:
        assert "illegal memory access" in str(error)
    else:
        raise AssertionError("a lost GPU is taken for a failed step")
