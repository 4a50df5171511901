"""The largest steps that a configuration allows, run once on nothing, to see what they need."""

from collections.abc import Callable

import torch

from tandem.engine.config import EngineConfig
from tandem.engine.memory.budget import DeviceMemory, Reserve, decode_graph_bytes
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.decoder import Model
from tandem.engine.schedule.sequence import Chunk, Sequence
from tandem.engine.step.batch import NO_POSITION, build_batch, build_decode_batch, pack_step
from tandem.engine.step.decode_graphs import batch_sizes
from tandem.engine.step.rows import Seats
from tandem.engine.step.sampler import DRAWN, Sampler
from tandem.runtime.messages import SamplingParams, StopConditions

# All that a row of sampling may ask for.
_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, logprobs=20, presence_penalty=1.0)


class StepProfile:
    """Steps of `model` over two blocks of their own; nothing else is read or written.

    `config` is a runner's; `longest` is how many tokens one sequence may have.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: Model,
        sample: Callable[..., None],
        longest: int,
        device: torch.device,
    ) -> None:
        assert config.block_size is not None
        self._config = config
        self._max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._model = model
        self._block_size = config.block_size
        self._longest = longest
        self._vocab_size = model_config.vocab_size
        self._seats = Seats(self._max_num_seqs, -(-longest // config.block_size), device)
        self._sampler = Sampler(
            model_config.vocab_size, model_config.eos_token_ids, sample, self._seats
        )
        dtype = getattr(torch, model_config.dtype)
        shape = (2, model_config.num_layers, 2, model_config.num_kv_heads, config.block_size)
        self._pool = torch.zeros(*shape, model_config.head_dim, dtype=dtype, device=device)

    @torch.inference_mode()
    def reserve(self, memory: DeviceMemory) -> Reserve:
        """What `memory` must have left for steps when the KV pool is there."""
        mixed = memory.peak_bytes(self.run_mixed)
        decode = memory.peak_bytes(self.run_decode)
        graphs = 0
        if self._config.cuda_graphs:
            row = self._vocab_size * self._pool.element_size()
            graphs = decode_graph_bytes(batch_sizes(self._max_num_seqs), decode, row)
        return Reserve(step_bytes=max(mixed, decode), graph_bytes=graphs)

    def run_mixed(self) -> None:
        """A step full of tokens and of sequences: decodes, and prompts that end in it."""
        chunks = self._mixed_chunks()
        step = pack_step(chunks)
        changes = self._seats.take_changes([chunk.seq for chunk in chunks])
        if changes is not None:
            self._seats.apply(changes)
        batch = build_batch(step, self._seats, self._block_size)
        logits = self._model.forward(batch, self._pool)
        plan = self._sampler.plan(step.rows)
        self._sampler.sample(logits, batch.sampled_seats, batch.sampled_positions, plan)

    def run_decode(self) -> None:
        """A decode step of all seats, as padding, whose attention has room for any context."""
        row = torch.tensor([self._seats.padding_seat, NO_POSITION, 0])
        inputs = row.unsqueeze(1).expand(3, self._max_num_seqs).contiguous()
        inputs = inputs.to(self._seats.device)
        batch = build_decode_batch(inputs, self._seats, self._block_size)
        logits = self._model.forward(batch, self._pool)
        self._sampler.sample(logits, batch.sampled_seats, batch.sampled_positions, DRAWN)

    def _mixed_chunks(self) -> list[Chunk]:
        """One chunk per seat: prompts as long as can be, then a token for everybody else."""
        num_left = self._config.max_num_batched_tokens
        chunks: list[Chunk] = []
        for seat in range(self._max_num_seqs):
            num_others = self._max_num_seqs - seat - 1
            length = min(self._longest, num_left - num_others)
            chunks.append(self._chunk(seat, length))
            num_left -= length
        return chunks

    def _chunk(self, seat: int, length: int) -> Chunk:
        seq = Sequence(
            f"profile {seat}",
            [0] * length,
            length,
            _PARAMS,
            StopConditions(max_tokens=1),
            block_table=[0] * -(-length // self._block_size),
            seat=seat,
        )
        return Chunk(seq, 0, length, True)
