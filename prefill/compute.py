"""Computing the prompt of one granted claim."""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Iterable

from tandem.engine.schedule.outputs import SequenceOutput
from tandem.engine.schedule.sequence import LayerProgress, Sequence, layer_boundaries
from tandem.engine.schedule.windows import first_read
from tandem.prefill.metrics import PrefillMetrics
from tandem.prefill.prefix_pull import PrefixPuller
from tandem.runtime.errors import TandemError, TransferError
from tandem.runtime.process.token_rate import TokenRate
from tandem.runtime.tracing.timeline import Timeline
from tandem.runtime.wire.block_hash import num_blocks_of
from tandem.runtime.wire.handoff_messages import FirstToken
from tandem.runtime.wire.request_bounds import checked_token_ids
from tandem.transfer.handoff.claimant import Claimant
from tandem.transfer.handoff.writer import BlockWriter, ComputedBlocks
from tandem.worker.worker import Worker

Step = SequenceOutput | LayerProgress
RATE_SMOOTHING = 0.2  # of the rate of computing


class Prompts:
    """The prompts that a worker computes for tickets now, by request id, with their steps."""

    def __init__(self, worker: Worker, metrics: PrefillMetrics) -> None:
        self.loop, self.group, self.metrics = worker.loop, worker.group, metrics
        self.transfer = worker.settings.transfer
        self.matcher_of = worker.matcher_of
        self.model_config = worker.engine.runner.model_config
        self.block_size = worker.engine.block_pool.block_size
        self.max_chunk_tokens = worker.engine.scheduler.max_num_batched_tokens
        self.rate = TokenRate(RATE_SMOOTHING)
        self.puller = PrefixPuller(self.loop, self.group, self.rate, self.block_size)
        self.open: dict[str, asyncio.Queue[Step]] = {}
        self.loop.listen_to_layers(self.advance)

    def advance(self, progress: Iterable[Step]) -> None:
        """Take steps of the engine; those of other sequences are dropped."""
        for step in progress:
            if (steps := self.open.get(step.request_id)) is not None:
                steps.put_nowait(step)


class PromptComputation:
    """Computes a prompt, has each block written once it is full, and sends the first token."""

    def __init__(
        self,
        prompts: Prompts,
        claimant: Claimant,
        writer: BlockWriter,
        timeline: Timeline,
    ) -> None:
        self._prompts = prompts
        self._request_id = claimant.request_id
        self._claimant = claimant
        self._writer = writer
        self._timeline = timeline
        self._steps: asyncio.Queue[Step] = asyncio.Queue()

    async def run(self) -> None:
        """Compute until the end of the prompt, or until the machine has an error."""
        self._prompts.open[self._request_id] = self._steps
        try:
            await self._run()
        finally:
            del self._prompts.open[self._request_id]

    def stop(self, reason: str) -> None:
        """End `run` with a TransferError."""
        error = TransferError(reason)
        self._steps.put_nowait(
            SequenceOutput(self._request_id, [], finish_reason="error", error=error)
        )

    def release(self) -> None:
        self._prompts.loop.post(lambda engine: engine.abort(self._request_id))

    async def _run(self) -> None:
        prompts, writer = self._prompts, self._writer
        seq = self._sequence()
        seq.matcher = await prompts.matcher_of(writer.machine.grant.grammar, seq)
        num_pulled = await self._pull_prefix(seq)
        started_at = time.perf_counter()
        await prompts.loop.call(lambda engine: engine.add(seq))
        while not writer.machine.error:
            step = await self._steps.get()
            if isinstance(step, LayerProgress):
                writer.write_ready(self._computed(seq, step))
                continue
            if step.error is not None:
                raise step.error
            is_last = step.finish_reason is not None
            if is_last:
                self._timeline.mark("computed")
                computed_s = time.perf_counter() - started_at
                prompts.rate.observe(seq.num_given_tokens - seq.num_cached_tokens, computed_s)
                prompts.metrics.computed(seq.num_given_tokens, seq.num_cached_tokens, num_pulled)
                writer.spawn(self._send_first_token(seq, step))
                await asyncio.sleep(0)  # it leaves before the write: the client waits for it
            num_tokens = seq.num_given_tokens if is_last else step.num_computed_tokens
            num_layers = len(prompts.model_config.layer_groups.places)
            progress = LayerProgress(self._request_id, num_tokens, num_layers, None)
            writer.write_ready(self._computed(seq, progress))
            if is_last:
                return

    def _computed(self, seq: Sequence, progress: LayerProgress) -> ComputedBlocks:
        """Return the blocks that are complete by now: full ones, and the last one at the end."""
        layout, num_tokens = self._prompts.group.layout, progress.num_computed_tokens
        num_blocks = num_tokens // self._prompts.block_size
        if num_tokens == seq.num_given_tokens:
            num_blocks = num_blocks_of(num_tokens, self._prompts.block_size)
        # Blocks of all groups are cut alike, for one table of descriptors.
        ends = layer_boundaries(layout.num_layers, seq.num_layer_groups)
        num_stored = self._prompts.model_config.layer_groups.num_stored(progress.num_layers)
        return ComputedBlocks(
            seq.block_table,
            num_blocks * layout.num_groups,
            [(0, *ends)[bisect_right(ends, num)] for num in num_stored],
            ends,
            progress.event,
        )

    def _sequence(self) -> Sequence:
        grant = self._writer.machine.grant
        token_ids = checked_token_ids(grant, self._prompts.model_config.vocab_size)
        self._check_fill(len(token_ids))
        return Sequence(
            request_id=self._request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids) - grant.num_generated,
            sampling=grant.sampling,
            stop=grant.stop,
            cache_salt=grant.cache_salt,
            prefill_only=True,
            num_layer_groups=self._num_layer_groups(len(token_ids)),
        )

    def _check_fill(self, num_tokens: int) -> None:
        """Raise TransferError for a block that a window passes, which is freed with it."""
        windows = self._prompts.group.layout.windows
        starts = [first_read(each, num_tokens - 1, self._prompts.block_size) for each in windows]
        for ordinal, _ in self._writer.machine.grant.fill:
            if ordinal // len(starts) < starts[ordinal % len(starts)]:
                raise TransferError(f"a window has passed block {ordinal}, which is to be filled")

    def _num_layer_groups(self, num_tokens: int) -> int:
        """Return the number of parts, by layers, in which the prompt's last chunk is written."""
        prompts, layout, rates = self._prompts, self._prompts.group.layout, self._writer.link.rates
        if rates is None or not prompts.transfer.stream_layers:
            return 1
        begin = num_blocks_of(num_tokens, prompts.block_size) * layout.num_groups
        begin -= num_blocks_of(prompts.max_chunk_tokens, prompts.block_size) * layout.num_groups
        num_blocks = sum(ordinal >= begin for ordinal, _ in self._writer.machine.grant.fill)
        return rates.num_groups(
            num_blocks, layout.block_bytes, layout.num_layers, layout.num_groups
        )

    async def _pull_prefix(self, seq: Sequence) -> int:
        """READ the decode worker's cached prefix if that is faster; return its tokens."""
        if not self._prompts.transfer.pull_prefixes:
            return 0
        num_tokens = await self._prompts.puller.pull(
            seq, self._writer.machine, self._writer.link, self._claimant.tell
        )
        if num_tokens:
            self._timeline.mark("prefix_pulled")
        return num_tokens

    async def _send_first_token(self, seq: Sequence, output: SequenceOutput) -> None:
        machine = self._writer.machine
        first = FirstToken(
            handoff_id=machine.handoff_id,
            attempt=machine.attempt,
            secret=machine.grant.secret,
            run=machine.run,
            token_id=output.token_ids[0],
            logprobs=output.logprobs[0] if output.logprobs else None,
            num_cached_tokens=seq.num_cached_tokens,
            timeline_ms=self._timeline.since("claimed"),
        )
        try:
            await self._claimant.send_first_token(first)
        except TandemError as error:
            machine.stop(f"the first token was not delivered: {error.message}")
