"""Writing the blocks of one granted claim into the decode worker's memory."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from tandem.runtime.errors import TransferError
from tandem.runtime.tracing.timeline import Timeline
from tandem.transfer.agents.group import TransferGroup, WriteOrder
from tandem.transfer.agents.link import Link
from tandem.transfer.handoff.prefill import PostedWrite, PrefillHandoff
from tandem.transfer.transport import Event

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """The part of a prompt that is in the pool, once `event` has happened where there is one.

    The first `num_blocks` of `block_table`, which take turns through the groups of layers, have
    their group's number of `num_layers`. `boundaries` are the ends of the layers of a block that
    are written apart.
    """

    block_table: Sequence[int]
    num_blocks: int
    num_layers: Sequence[int]
    boundaries: Sequence[int]
    event: Event | None = None


class BlockWriter:
    """Posts writes of computed blocks, as the machine allows them, and awaits their ends.

    `on_written` gets the bytes of each write that has arrived, and None for one that failed.
    """

    def __init__(
        self,
        group: TransferGroup,
        machine: PrefillHandoff,
        link: Link,
        timeline: Timeline,
        on_written: Callable[[int | None], None],
    ) -> None:
        self.machine = machine
        self.link = link
        self._group = group
        self._timeline = timeline
        self._on_written = on_written
        self._tasks: list[asyncio.Task[None]] = []

    def write_ready(self, computed: ComputedBlocks) -> None:
        """Post what is computed and not posted yet."""
        machine, longest_s = self.machine, self._group.longest_write_s
        ready = machine.ready(computed.num_blocks, computed.num_layers)
        for layers, ordinals in ready.items():
            for write in machine.post(ordinals, layers, time.perf_counter(), longest_s):
                self.spawn(self._write(write, computed))

    async def _write(self, write: PostedWrite, computed: ComputedBlocks) -> None:
        machine, group = self.machine, self._group
        self._timeline.mark("first_write")
        local_blocks = [computed.block_table[ordinal] for ordinal in write.ordinals]
        order = WriteOrder(
            write.ranks,
            write.layers,
            list(zip(local_blocks, write.remote_blocks, strict=True)),
            machine.landed_notice(write),
            computed.boundaries,
            write.post_before,
            computed.event,
        )
        try:
            notice = await group.write(self.link, order)
        except TransferError as error:
            machine.failed(write, error.message)
            self._on_written(None)
            return
        machine.completed(write, notice)
        parts = group.layout.span_parts(write.ranks.prefill_heads, write.layers)
        num_bytes = len(local_blocks) * sum(length for _, length in parts)
        self._on_written(round(num_bytes * group.byte_scale))
        if not machine.pinned:
            self._timeline.mark("last_write")

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` beside the writes; `drain` awaits it."""
        self._tasks.append(asyncio.create_task(work))

    async def drain(self) -> None:
        """Wait for the end of everything that was spawned."""
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if outcome is not None:
                logger.error("handoff %s", self.machine.handoff_id.hex(), exc_info=outcome)
