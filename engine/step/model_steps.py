"""The passes of a model that steps are made of: over its batch rows, with sampling and scores."""

from collections.abc import Callable, Collection

import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.batch.batch import PackedStep, build_batch, build_decode_batch
from tandem.engine.batch.rows import BatchRows
from tandem.engine.config import EngineConfig
from tandem.engine.decoder.any_model import AnyModel
from tandem.engine.decoder.kernel_set import Kernels
from tandem.engine.step.prompt_scoring import HostScores, PromptScorer
from tandem.engine.step.sampler import Sampler, SamplingPlan
from tandem.kernels.sampling.rows import SampledRows
from tandem.runtime.wire.block_hash import num_blocks_of


class ModelSteps:
    """Passes of `model` over `pool`, and what is drawn from them.

    `config` is a resolved one; `longest` is the number of tokens that one sequence may have.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: AnyModel,
        kernels: Kernels,
        longest: int,
        pool: torch.Tensor,  # [num_blocks, group_size, 2, num_kv_heads, block_size, head_dim]
    ) -> None:
        assert config.block_size is not None
        self.model = model
        self.pool = pool
        self.block_size = config.block_size
        self.batch_rows = BatchRows(
            config.max_num_seqs,
            num_blocks_of(longest, config.block_size),
            pool.device,
            num_groups=len(model_config.layer_groups.windows),
            pads_tables=config.kernels == "torch",
        )
        self.sampler = Sampler(
            model_config.vocab_size,
            model_config.eos_token_ids,
            kernels.sample,
            kernels.mask_logits,
            self.batch_rows,
        )
        self._scorer = PromptScorer(model, kernels.token_logprobs, config.max_num_seqs)

    def run(
        self,
        step: PackedStep,
        plan: SamplingPlan,
        on_layers: Callable[[int], None] | None = None,
        boundaries: Collection[int] = (),
    ) -> tuple[SampledRows, HostScores | None]:
        """Compute a step, whose changes have been applied to the batch rows, and sample.

        `on_layers` and `boundaries` are those of decoder.Model.hidden.
        """
        batch = build_batch(step, self.batch_rows, self.block_size)
        hidden = self.model.hidden(
            batch, self.pool, on_layers, boundaries, of_all=bool(step.scored)
        )
        scores = None
        if step.scored:
            scores = self._scorer.score(hidden, step.scored)
            hidden = hidden.index_select(0, batch.logits_indices)
        logits, sampled = self.model.logits(hidden), batch.sampled
        return self.sampler.sample(logits, sampled.batch_rows, sampled.context_lens, plan), scores

    def follow(
        self,
        step: PackedStep,
        scored: Collection[tuple[int, int]],
        on_layers: Callable[[int], None],
        boundaries: Collection[int],
    ) -> None:
        """Take this rank's part in a step, which another rank samples.

        `scored` are the first rows of its scored chunks among the step's tokens, and their counts.
        """
        batch = build_batch(step, self.batch_rows, self.block_size)
        hidden = self.model.hidden(batch, self.pool, on_layers, boundaries, of_all=bool(scored))
        for row, num_rows in scored:
            for part in self._scorer.parts(row, num_rows):
                self.model.logits(hidden[part.start : part.stop])
        if scored:
            hidden = hidden.index_select(0, batch.logits_indices)
        self.model.logits(hidden)

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [num_tokens, vocab_size] for `inputs` of a decode step (build_decode_batch)."""
        batch = build_decode_batch(inputs, self.batch_rows, self.block_size)
        return self.model.logits(self.model.hidden(batch, self.pool))

    def sample(self, logits: torch.Tensor, inputs: torch.Tensor, plan: SamplingPlan) -> SampledRows:
        """Draw the next token of every row of a decode step, and keep it for its batch row."""
        return self.sampler.sample(logits, inputs[0], inputs[1] + 1, plan)
