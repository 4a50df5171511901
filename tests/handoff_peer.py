"""One side of a handoff, driven by hand: a node, an engine and transfers of its own."""

import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.outputs import SequenceOutput
from tandem.engine.schedule.sequence import Sequence
from tandem.models.random_model import write_random_model
from tandem.queue.config import QueueConfig
from tandem.queue.deployment import deployment_id
from tandem.queue.jetstream import JetStreamQueue
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.membership.model_files import weights_fingerprint
from tandem.runtime.membership.node import Node
from tandem.runtime.wire.messages import SamplingParams, StopConditions, TokenLogprobs
from tandem.transfer.agents.group import TransferGroup
from tandem.transfer.agents.link import LinkRates
from tandem.transfer.config import TransferConfig
from tandem.transfer.layout import KvLayout

MODEL = "tiny"
BLOCK_SIZE = 4
NUM_BLOCKS = 64
# Shorter than a write may take, which no worker's settings can be: nothing here writes so late.
TRANSFER = TransferConfig(backend="loopback").model_copy(
    update={"grace_ms": 100, "lease_margin_ms": 10}
)
QUEUE = QueueConfig(ack_wait_s=1.0)


# As if any write cost nothing but its bytes: as many groups of layers as there may be.
FREE_WRITES = LinkRates(
    overhead_s=1e-7,
    descriptor_s=0.0,
    s_per_byte=1e-6,
    read_s_per_byte=1e-6,
    wire_bytes_per_s=1e6,
    core_share=0.0,
)


def write_tiny_model(folder: Path, window: int = 0, layers: str = "fw") -> Path:
    """A model whose text changes with every token of its prompt. Layers "w" have the window."""
    write_random_model(
        folder,
        vocab_size=320,
        hidden_size=32,
        num_layers=len(layers),
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        tie_word_embeddings=False,
    )
    if window:
        path = folder / "config.json"
        kinds = [{"f": "full_attention", "w": "sliding_attention"}[each] for each in layers]
        changes = {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def fresh_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed + 1000 * num_tokens)
    return [draw.randrange(3, 300) for _ in range(num_tokens)]


@pytest_asyncio.fixture(loop_scope="module")
async def stage(shared_stage: Any) -> AsyncIterator[Any]:
    """The module's stage with nothing cached; afterwards nothing may be held."""
    await shared_stage.forget()
    yield shared_stage
    await shared_stage.balanced()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def engine_config(model: Path, **changes: object) -> EngineConfig:
    fields = {"model": str(model), "block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "threads": 1}
    return EngineConfig.model_validate({**fields, "device": "cpu", **changes})


@dataclass(slots=True)
class Text:
    """What a sequence gave, and why it ended."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    stop_token_id: int | None = None


class HandoffPeer:
    """Joins the cluster as `component`; its engine steps only when it is told to."""

    def __init__(
        self, runtime: RuntimeConfig, model: Path, component: str, transfer: TransferConfig
    ) -> None:
        self.node = Node(runtime, component=component, model=MODEL)
        self.engine = Engine(engine_config(model), ModelRunner(engine_config(model)))
        pools = self.engine.runner.kv_caches
        num_kv_heads = self.engine.runner.model_config.num_kv_heads
        layout = KvLayout.of(pools[0].tensor, num_kv_heads, windows=pools[0].windows)
        self.group = TransferGroup(transfer, layout, pools, self.node.instance_id, self.node.epoch)
        self.notices: list[bytes] = []
        self.deployment = deployment_id(
            runtime.namespace,
            MODEL,
            weights_fingerprint(model),
            self.engine.runner.model_config.kv_form,
            self.group.layout.digest(),
            transfer.backend,
        )
        self.queue = JetStreamQueue(
            self.node.nats, QUEUE, runtime.namespace, MODEL, self.deployment
        )
        self.node.deployment = self.deployment

    async def __aenter__(self) -> "HandoffPeer":
        await self.node.connect()
        await self.group.start(self.on_notice)
        await self.queue.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.queue.close()
        await self.group.close()
        await self.node.close()

    def on_notice(self, rank: int, data: bytes) -> None:
        self.notices.append(data)

    def forget(self) -> None:
        """Drop every sequence, and all that is cached."""
        scheduler = self.engine.scheduler
        states = (scheduler.waiting, scheduler.running, scheduler.remote, scheduler.exported)
        for request_id in [name for state in states for name in state]:
            self.engine.abort(request_id)
        self.engine.block_pool.enable_prefix_cache = True
        self.engine.block_pool.clear_cache()

    def run(self, request_id: str) -> list[SequenceOutput]:
        """Steps until `request_id` has ended; its outputs."""
        outputs = []
        while not outputs or outputs[-1].finish_reason is None:
            outputs += [output for output in self.engine.step() if output.request_id == request_id]
        return outputs

    def undisturbed(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        stop: StopConditions,
        salt: str = "undisturbed",
    ) -> Text:
        """What an engine alone says to `prompt`; its blocks are cached under `salt`."""
        seq = Sequence("undisturbed", list(prompt), len(prompt), sampling, stop, salt)
        self.engine.add(seq)
        text = Text([], [])
        for output in self.run("undisturbed"):
            text.token_ids += output.token_ids
            text.logprobs += output.logprobs or []
            text.finish_reason, text.stop_token_id = output.finish_reason, output.stop_token_id
        return text
