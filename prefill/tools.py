"""The parts of a prefill worker that its jobs and its computations of prompts use."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.prefill.metrics import PrefillMetrics
from tandem.runtime.tracing.trace import TraceFile
from tandem.runtime.wire.messages import Grammar
from tandem.transfer.agents.group import TransferGroup
from tandem.transfer.config import TransferConfig
from tandem.transfer.handoff.sender import SenderTools

if TYPE_CHECKING:  # other engines than Tandem's have jobs, too
    from tandem.engine.architecture.layer_groups import LayerGroups
    from tandem.engine.core.loop import EngineLoop
    from tandem.engine.schedule.matcher import Matcher
    from tandem.engine.schedule.outputs import SequenceOutput
    from tandem.engine.schedule.sequence import LayerProgress, Sequence
    from tandem.prefill.prefix_pull import PrefixPuller


@dataclass(slots=True, frozen=True)
class JobTools:
    """The parts of a prefill worker that all of its jobs use."""

    sender: SenderTools
    metrics: PrefillMetrics
    trace: TraceFile
    renew_interval_s: float


@dataclass(slots=True, frozen=True)
class PromptTools:
    """The parts of a prefill worker with Tandem's engine that its computations use."""

    group: TransferGroup
    loop: "EngineLoop"
    # request id |-> the outputs of its steps
    steps: "dict[str, asyncio.Queue[SequenceOutput | LayerProgress]]"
    metrics: PrefillMetrics
    puller: "PrefixPuller"
    matcher_of: "Callable[[Grammar | None, Sequence], Awaitable[Matcher | None]]"
    block_size: int
    layer_groups: "LayerGroups"
    vocab_size: int
    max_chunk_tokens: int  # that one step computes
    transfer: TransferConfig
