"""The parts of a prefill worker that all of its jobs use."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tandem.engine.loop import EngineLoop
from tandem.engine.outputs import SequenceOutput
from tandem.engine.schedule.sequence import LayerProgress, Sequence
from tandem.engine.step.masks import Matcher
from tandem.prefill.metrics import PrefillMetrics
from tandem.prefill.prefix_pull import PrefixPuller
from tandem.runtime.discovery import TypedView
from tandem.runtime.messages import Grammar, TransferMetadata
from tandem.runtime.node import Node
from tandem.runtime.trace import TraceFile
from tandem.transfer.config import TransferConfig
from tandem.transfer.group import TransferGroup

Step = SequenceOutput | LayerProgress


@dataclass(slots=True, frozen=True)
class JobTools:
    """The parts of a prefill worker that all of its jobs use."""

    node: Node
    group: TransferGroup
    loop: EngineLoop
    steps: dict[str, "asyncio.Queue[Step]"]  # request id |-> the outputs of its steps
    peers: TypedView[TransferMetadata]
    metrics: PrefillMetrics
    trace: TraceFile
    puller: PrefixPuller
    matcher_of: Callable[[Grammar | None, Sequence], Awaitable[Matcher | None]]
    deployment: str
    block_size: int
    vocab_size: int
    max_chunk_tokens: int  # that one step computes
    transfer: TransferConfig
    renew_interval_s: float
