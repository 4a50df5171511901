"""Writing the blocks of one granted claim into the decode worker's memory."""

import asyncio
import logging
import time
from collections.abc import Coroutine

from tandem.engine.schedule.sequence import LayerProgress, Sequence, layer_boundaries
from tandem.engine.schedule.windows import NO_BLOCK
from tandem.prefill.tools import JobTools
from tandem.runtime.block_hash import num_blocks_of
from tandem.runtime.errors import TransferError
from tandem.runtime.timeline import Timeline
from tandem.transfer.group import WriteOrder
from tandem.transfer.handoff.prefill import PostedWrite, PrefillHandoff
from tandem.transfer.link import Link

logger = logging.getLogger(__name__)


class BlockWriter:
    """Posts writes of computed blocks, as the machine allows them, and awaits their ends."""

    def __init__(
        self, tools: JobTools, machine: PrefillHandoff, link: Link, timeline: Timeline
    ) -> None:
        self.machine = machine
        self.link = link
        self._tools = tools
        self._timeline = timeline
        self._tasks: list[asyncio.Task[None]] = []

    def write_ready(self, seq: Sequence, progress: LayerProgress) -> None:
        """Post the blocks that are complete by now: full ones, and the last one at the end."""
        machine, num_tokens = self.machine, progress.num_computed_tokens
        num_blocks = num_tokens // self._tools.block_size
        if num_tokens == seq.num_given_tokens:
            num_blocks = num_blocks_of(num_tokens, self._tools.block_size)
        num_blocks *= self._tools.group.layout.num_groups
        longest_s = self._tools.group.longest_write_s
        for first_layer, ordinals in machine.ready(num_blocks, progress.num_layers).items():
            if any(seq.block_table[ordinal] == NO_BLOCK for ordinal in ordinals):
                machine.stop("a window has passed a block that is to be filled")
                return
            layers = range(first_layer, progress.num_layers)
            for write in machine.post(ordinals, layers, time.perf_counter(), longest_s):
                self.spawn(self._write(seq, write, progress))

    async def _write(self, seq: Sequence, write: PostedWrite, progress: LayerProgress) -> None:
        machine, group = self.machine, self._tools.group
        self._timeline.mark("first_write")
        local_blocks = [seq.block_table[ordinal] for ordinal in write.ordinals]
        order = WriteOrder(
            write.ranks,
            write.layers,
            list(zip(local_blocks, write.remote_blocks, strict=True)),
            lambda checksums: machine.landed_notice(write, checksums),
            layer_boundaries(group.layout.num_layers, seq.num_layer_groups),
            write.post_before,
            progress.event,
        )
        try:
            notice = await group.write(self.link, order)
        except TransferError as error:
            machine.failed(write, error.message)
            self._tools.metrics.write_failed()
            return
        machine.completed(write, notice)
        share = len(write.layers) / group.layout.num_layers / len(self.link.rank_pairs)
        num_bytes = len(local_blocks) * share * group.layout.tp_size * group.layout.block_bytes
        self._tools.metrics.written(round(num_bytes))
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
