"""Steps run over zeros before the first request: for their memory, and to build their kernels."""

import logging
from collections.abc import Callable, Collection
from functools import partial

import msgspec
import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.batch.batch import NO_POSITION, pack_step
from tandem.engine.config import EngineConfig, batch_sizes
from tandem.engine.decoder.any_model import AnyModel
from tandem.engine.decoder.kernel_set import Kernels
from tandem.engine.memory.budget import DeviceMemory, Reserve, decode_graph_bytes
from tandem.engine.memory.kv_blocks import block_shape
from tandem.engine.schedule.sequence import Chunk, Sequence
from tandem.engine.step.model_steps import ModelSteps
from tandem.engine.step.sampler import DRAWN, GREEDY, SamplingPlan
from tandem.kernels.sampling.rows import NO_TOKEN, TokenMasks
from tandem.runtime.errors import ModelError
from tandem.runtime.process.progress import ProgressBar
from tandem.runtime.wire.block_hash import num_blocks_of
from tandem.runtime.wire.messages import SamplingParams, StopConditions

logger = logging.getLogger(__name__)

# Everything that a sequence may ask of sampling; the other penalties need generated tokens.
_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, logprobs=20, repetition_penalty=1.1)
_SCORED = msgspec.structs.replace(_PARAMS, prompt_logprobs=True)
# Requests that need other builds of the sampling kernels.
_OTHER_PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0, logprobs=1),
)


class StepProfile:
    """Steps of `model` over two blocks of their own; nothing else is read or written.

    `config` is a resolved one; `longest` is the number of tokens that one sequence may have.
    Their shape is that of `pool_config`, None: of `model_config`. `own_heads` returns the part of a
    pool that `model` reads and writes; None: all of it.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: AnyModel,
        kernels: Kernels,
        longest: int,
        device: torch.device,
        own_heads: Callable[[torch.Tensor], torch.Tensor] | None = None,
        pool_config: ModelConfig | None = None,
    ) -> None:
        assert config.block_size is not None and config.max_num_batched_tokens is not None
        self._config = config
        self._max_num_tokens = config.max_num_batched_tokens
        self._max_num_seqs = min(config.max_num_seqs, self._max_num_tokens)
        self._longest = longest
        self._vocab_size = model_config.vocab_size
        self._num_layers = model_config.num_layers
        self._num_groups = len(model_config.layer_groups.windows)
        self._mask_logits = kernels.mask_logits
        dtype = getattr(torch, model_config.dtype)
        shape = block_shape(pool_config or model_config, config.block_size)
        pool = torch.zeros(2, *shape, dtype=dtype, device=device)
        self._pool = pool if own_heads is None else own_heads(pool)
        self._steps = ModelSteps(config, model_config, model, kernels, longest, self._pool)

    @torch.inference_mode()
    def try_one(self) -> None:
        """Compute one token. Raise ModelError where the model's code fails or computes no numbers.

        What fails is named by its layer.
        """
        passed: list[int] = []
        last = range(1, self._num_layers + 1)
        try:
            self._run([self._chunk(0, 1, SamplingParams(temperature=0.0))], passed.append, last)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever modelling code raises
            num = len(passed)
            where = f"in layer {num}" if num < self._num_layers else "after its last attention"
            raise ModelError(f"a first token fails {where}: {error}") from error
        if int(self._steps.batch_rows.drawn[0]) == NO_TOKEN:
            raise ModelError("the logits of a first token are not finite")

    @torch.inference_mode()
    def reserve(self, memory: DeviceMemory) -> Reserve:
        """Measure the part of `memory` that the KV pool must leave for steps."""
        mixed = memory.peak_bytes(self.run_mixed)
        decode = memory.peak_bytes(self.run_decode)
        graphs = 0
        if self._config.cuda_graphs:
            row = self._vocab_size * self._pool.element_size()
            graphs = decode_graph_bytes(batch_sizes(self._max_num_seqs), decode, row)
        return Reserve(step_bytes=max(mixed, decode), graph_bytes=graphs)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run steps of many sizes and every kind of sampling: no later step builds a kernel.

        The sizes between are for libraries that load kernels of theirs by size.
        """
        sizes = [1 << bit for bit in range((self._max_num_tokens - 1).bit_length())]
        steps: list[Callable[[], object]] = [
            *(partial(self._run_one, min(size, self._longest), _PARAMS) for size in sizes),
            self.run_mixed,
            *(partial(self._run_one, 1, params) for params in _OTHER_PARAMS),
            self._run_masks,
        ]
        label = "kernels to build" if self._pool.is_meta else "kernels"
        with ProgressBar(label, total=len(steps), on_line=logger.info) as bar:
            for step in steps:
                step()
                bar.advance()

    def _run_one(self, num_tokens: int, params: SamplingParams) -> None:
        self._run([self._chunk(0, num_tokens, params)])

    def _run_masks(self) -> None:
        device, num_words = self._pool.device, -(-self._vocab_size // 32)
        logits = torch.zeros(1, self._vocab_size, dtype=self._pool.dtype, device=device)
        rows = torch.zeros(1, dtype=torch.int64, device=device)
        bits = torch.zeros(1, num_words, dtype=torch.int32, device=device)
        self._mask_logits(logits, TokenMasks(rows, bits))

    def run_mixed(self) -> None:
        """Run a step full of tokens and of sequences: decodes, and prompts that end in it."""
        self._run(self._mixed_chunks())

    def _run(
        self,
        chunks: list[Chunk],
        on_layers: Callable[[int], None] | None = None,
        boundaries: Collection[int] = (),
    ) -> None:
        step, steps = pack_step(chunks), self._steps
        changes = steps.batch_rows.take_changes([chunk.seq for chunk in chunks])
        if changes is not None:
            steps.batch_rows.apply(changes)
        plan = steps.sampler.plan(step.sampled, len(chunks))
        steps.run(step, plan, on_layers, boundaries)

    def run_decode(self) -> None:
        """Run a decode step of all batch rows, as padding, with room for contexts of any length."""
        self._run_decode(self._max_num_seqs, DRAWN)

    @torch.inference_mode()
    def run_recorded(self) -> None:
        """Run a decode step of each batch size for which a graph is recorded."""
        for size in batch_sizes(self._max_num_seqs):
            self._run_decode(size, DRAWN, GREEDY)

    def _run_decode(self, num_rows: int, *plans: SamplingPlan) -> None:
        row = torch.tensor([self._steps.batch_rows.padding_row, NO_POSITION, 0])
        inputs = row.unsqueeze(1).expand(3, num_rows).contiguous().to(self._pool.device)
        logits = self._steps.logits(inputs)
        for plan in plans:
            self._steps.sample(logits, inputs, plan)

    def _mixed_chunks(self) -> list[Chunk]:
        """Return one chunk per batch row: prompts as long as possible, then chunks of one token."""
        num_left = self._max_num_tokens
        chunks: list[Chunk] = []
        for batch_row in range(self._max_num_seqs):
            num_others = self._max_num_seqs - batch_row - 1
            length = min(self._longest, num_left - num_others)
            chunks.append(self._chunk(batch_row, length, _SCORED))
            num_left -= length
        return chunks

    def _chunk(self, batch_row: int, length: int, params: SamplingParams) -> Chunk:
        seq = Sequence(
            f"profile {batch_row}",
            [0] * length,
            length,
            params,
            StopConditions(max_tokens=1),
            block_table=[0] * (num_blocks_of(length, self._steps.block_size) * self._num_groups),
            batch_row=batch_row,
        )
        return Chunk(seq, 0, length, True)
