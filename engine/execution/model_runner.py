"""The model on its device: weights, KV pool, and steps from chunks to tokens."""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.rope import rope_tables
from tandem.engine.batch.batch import PackedStep, pack_step, started_blocks
from tandem.engine.batch.rows import RowChanges
from tandem.engine.config import EngineConfig, batch_sizes
from tandem.engine.decoder.any_model import AnyModel
from tandem.engine.decoder.decoder import Model
from tandem.engine.decoder.kernel_set import Kernels, load_kernels
from tandem.engine.execution.model_code import choose_model_config
from tandem.engine.execution.prebuild import prebuild
from tandem.engine.execution.profile import StepProfile
from tandem.engine.execution.resolve import rank_devices, resolve
from tandem.engine.memory.budget import CudaMemory, kv_budget_bytes
from tandem.engine.memory.host_memory import keep_freed_memory
from tandem.engine.memory.kv_blocks import (
    choose_max_model_len,
    most_useful_blocks,
    num_blocks_within,
)
from tandem.engine.memory.kv_cache import KvCache, kind_of, memory_of
from tandem.engine.ranks.marks import ALL_LAYERS, StepMarks
from tandem.engine.ranks.rank import Rank, of_rank, with_segments
from tandem.engine.ranks.widths import num_segments
from tandem.engine.schedule.sequence import Chunk, OnLayers
from tandem.engine.step.decode_graphs import CudaRecorder, DecodeGraphs, Recorder
from tandem.engine.step.device_loss import check_device, noticing_device_loss
from tandem.engine.step.launched import LaunchedStep, start_timing
from tandem.engine.step.model_steps import ModelSteps
from tandem.engine.step.sampler import HostTokens
from tandem.engine.weights.weights import ModelWeights, load_weights
from tandem.runtime.errors import ModelError

if TYPE_CHECKING:
    from tandem.engine.architecture.shard import Shard
    from tandem.engine.ranks.step_message import StepMessage

logger = logging.getLogger(__name__)

Announce = Callable[[int], None]  # of a number of layers whose K/V is stored


class ModelRunner:
    """One model on one device. Built by any thread, then used by one thread at a time.

    `config` is the given one with "auto" and None resolved; `model_config.dtype` is the dtype in
    which the model runs. On a GPU all steps run on one stream of their own. `recorder` records
    decode steps; None: CUDA graphs, where there is a GPU and the configuration allows them.
    `model_config` and `weights`, on the device, replace the files of config.model.

    With config.tp above 1 it is rank 0, and starts the processes of the others, which end with
    `close` and run the module `follower`; in one of those `rank` is its own. Raises ModelError,
    ConfigError or CapacityError when it cannot be built.
    """

    def __init__(
        self,
        config: EngineConfig,
        recorder: Recorder | None = None,
        *,
        model_config: ModelConfig | None = None,
        weights: ModelWeights | None = None,
        rank: Rank | None = None,
        follower: str | None = None,
    ) -> None:
        stored = model_config or choose_model_config(config.model, config.model_impl)
        self.config, self.model_config = resolve(config, stored)
        self._num_segments = num_segments(self.config, self.model_config)
        self.followers = None
        self._rank = rank
        if self.config.tp > 1 and rank is None:
            # Not at the top: one process alone does without.
            from tandem.engine.execution.followers import Followers

            assert weights is None and model_config is None, "the other ranks read the files"
            devices = rank_devices(config.device, self.config)
            where = self.config, self.model_config, self._num_segments, devices, follower
            self.followers = Followers(*where)
            self._rank = self.followers.rank
        self._draws = rank is None
        self._device = device = torch.device(self.config.device)
        self.device_kind = kind_of(device)
        self.marks = StepMarks(on_gpu=device.type == "cuda")  # used in a rank above 0
        torch.set_num_threads(config.num_threads())
        self._stream = None
        if device.type == "cpu":
            keep_freed_memory()
        else:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The reference kernels multiply masked slots by zero, so none of them may hold a NaN.
        self._clears_started_blocks = self.config.kernels == "torch"
        try:
            with self._on_stream():
                self._build(weights)
                self._graphs = self._record(recorder)
        except BaseException:
            self.close()
            raise
        if self._stream is not None:
            self._stream.synchronize()
        logger.info(
            "%s on %s in %s, %d KV blocks of %d tokens",
            config.model,
            device,
            self.model_config.dtype,
            self.kv_cache.num_blocks,
            self.kv_cache.block_size,
        )

    def close(self) -> None:
        """End the processes of the other ranks, where there are some; no step may be under way."""
        if self.followers is not None:
            self.followers.close()

    def check_device(self) -> None:
        """Raise DeviceLostError where the device is lost. It waits for no work."""
        check_device(self._device)

    @property
    def kv_caches(self) -> tuple[KvCache]:
        """The pool that all ranks share, as if there were one; on GPUs, that of this rank."""
        return (self.kv_cache,)

    def _build(self, weights: ModelWeights | None) -> None:
        """Make weights, model, KV pool and steps; resolve the pool's size."""
        config, model_config, device = self.config, self.model_config, self._device
        assert config.block_size is not None and config.kernels != "auto"
        dtype: torch.dtype = getattr(torch, model_config.dtype)
        kernels = load_kernels(
            config.kernels,
            deterministic=config.deterministic,
            fused_products=config.fused_products,
            dependent_launch=config.dependent_launch,
            cascade_attention=config.cascade_attention,
        )
        kernels, shard = self._of_ranks(kernels)
        generic = None
        if model_config.architecture.code:
            # Not at the top: transformers is an extra.
            from tandem.engine.transformers_models.generic_model import GenericModel

            generic = GenericModel(config.model, model_config, kernels, device)
        else:
            weights = weights or load_weights(config.model, model_config, dtype, device, shard)
        if self._rank is not None:
            self._rank.ready()

        def make_model(longest: int) -> AnyModel:
            if generic is not None:
                return generic
            assert weights is not None
            tables = rope_tables(model_config, longest, dtype, device)
            return Model(shard.config if shard else model_config, weights, tables, kernels)

        rank = self._rank
        pool_config = self._pool_config = rank.pool_config if rank else model_config
        if config.num_blocks is not None or device.type == "cpu":
            num_blocks = config.num_blocks or num_blocks_within(
                config.kv_memory_bytes, pool_config, config.block_size, memory_of(device)
            )
            longest = choose_max_model_len(config, model_config, num_blocks, config.block_size)
            model = make_model(longest)
            profile = self._profile(model, kernels, longest)
            profile.try_one()
            if device.type == "cuda":
                self._prebuild(weights, kernels, longest)
                profile.warm_up()
            del profile
        else:
            longest = config.max_model_len or model_config.max_position_embeddings
            model = make_model(longest)
            self._prebuild(weights, kernels, longest)
            num_blocks = self._num_blocks_of_all(model, kernels, longest)
            longest = choose_max_model_len(config, model_config, num_blocks, config.block_size)
        self.config = config.model_copy(update={"num_blocks": num_blocks, "max_model_len": longest})
        self.kv_cache = KvCache(
            pool_config, num_blocks, config.block_size, device, rank.allocate if rank else None
        )
        pool = self._own_heads(self.kv_cache.tensor)
        self._steps = ModelSteps(config, model_config, model, kernels, longest, pool)

    def _of_ranks(self, kernels: Kernels) -> "tuple[Kernels, Shard | None]":
        """Return the kernels with the order of sums of the ranks, and this one's share."""
        if self._rank is not None:
            return of_rank(kernels, self._rank, self._num_segments), self._rank.shard
        if self._num_segments == 1:
            return kernels, None
        return with_segments(kernels, self.model_config, self._num_segments), None

    def _own_heads(self, pool: torch.Tensor) -> torch.Tensor:
        return pool if self._rank is None else self._rank.own_heads(pool)

    def _prebuild(self, weights: ModelWeights | None, kernels: Kernels, longest: int) -> None:
        """Build a native model's kernels; the warm-up builds those of transformers' code."""
        if weights is None or self.config.kernels != "triton":
            return
        try:
            share = None if self._rank is None else self._rank.shard.config
            prebuild(self.config, self.model_config, weights, kernels, longest, share)
        except Exception:
            logger.exception("kernels could not be built beside one another")

    def _num_blocks_of_all(self, model: AnyModel, kernels: Kernels, longest: int) -> int:
        """Return how many blocks fit every rank's GPU beside the largest steps."""
        num_blocks = self._num_blocks_beside_steps(model, kernels, longest)
        return num_blocks if self._rank is None else self._rank.agree(num_blocks)

    def _num_blocks_beside_steps(self, model: AnyModel, kernels: Kernels, longest: int) -> int:
        """Return how many blocks fit a GPU beside the largest steps, by running those."""
        config = self.config
        assert config.block_size is not None
        memory = CudaMemory(self._device)
        profile = self._profile(model, kernels, longest)
        profile.try_one()
        reserve = profile.reserve(memory)
        profile.warm_up()
        del profile
        budget = kv_budget_bytes(config, memory, reserve)
        memory_kind = memory_of(self._device)
        return min(
            num_blocks_within(budget, self._pool_config, config.block_size, memory_kind),
            most_useful_blocks(config, self._pool_config, config.block_size, longest),
        )

    def _profile(self, model: AnyModel, kernels: Kernels, longest: int) -> StepProfile:
        parts = self.config, self.model_config, model, kernels, longest, self._device
        return StepProfile(*parts, self._own_heads, self._pool_config)

    @torch.inference_mode()
    def _record(self, recorder: Recorder | None) -> DecodeGraphs | None:
        config = self.config
        if recorder is None:
            # The reference kernels look at lengths on the host, which a graph cannot.
            if self._stream is None or not config.cuda_graphs or config.kernels == "torch":
                return None
            recorder = CudaRecorder(self._stream)
        assert config.max_num_batched_tokens is not None
        sizes = batch_sizes(min(config.max_num_seqs, config.max_num_batched_tokens))
        try:
            with noticing_device_loss(self._device):
                return DecodeGraphs(self._steps, sizes, recorder, draws=self._draws)
        except RuntimeError as error:  # of torch: a worker without graphs is slower, and serves
            if self._rank is not None:  # all ranks replay a step, or none
                raise ModelError(
                    f"decode steps are not recorded on {self._device}: {error}; "
                    "with --engine.cuda_graphs=false they start slower, and need no recording"
                ) from error
            logger.warning("decode steps are not recorded, and start slower: %s", error)
            return None

    @torch.inference_mode()
    def launch(
        self,
        chunks: list[Chunk],
        on_layers: OnLayers | None = None,
        boundaries: Collection[int] = (),
    ) -> LaunchedStep:
        """Begin to compute every chunk's tokens and to store their K/V; sample where asked.

        A sequence's block table must cover positions [0, end), and it must have a batch row;
        sequences may change as soon as this returns. `on_layers` is called for each of
        `boundaries`, in order, before it returns. On a CPU the step is done by then. When it
        raises, nothing of the step is under way. Raises DeviceLostError when no other step can run.
        """
        with noticing_device_loss(self._device), self._on_stream():
            try:
                return self._launch(chunks, on_layers, boundaries)
            except BaseException:
                if self.followers is not None:
                    self.followers.check()
                self._steps.batch_rows.forget([chunk.seq for chunk in chunks])
                if self._stream is not None:
                    self._stream.synchronize()
                raise

    def _launch(
        self, chunks: list[Chunk], on_layers: OnLayers | None, boundaries: Collection[int]
    ) -> LaunchedStep:
        if not chunks:
            return LaunchedStep(self._device, start_timing(self._device), None)
        step, steps = pack_step(chunks), self._steps
        changes = steps.batch_rows.take_changes([chunk.seq for chunk in chunks])
        plan = steps.sampler.plan(step.sampled, len(chunks))
        timing = start_timing(self._device)
        if changes is not None:
            steps.batch_rows.apply(changes)
        if self._clears_started_blocks:
            self._clear(started_blocks(chunks, steps.batch_rows.num_groups, steps.block_size))
        is_recorded = self._graphs is not None and on_layers is None and self._graphs.can_run(step)
        announce: Announce | None = None
        if on_layers is not None:
            if self.followers is not None:
                on_layers = self.followers.marked(on_layers)
            announce = partial(_announce_layers, on_layers, self._device)
        with self._together(step, changes, announce, boundaries, is_recorded) as announce:
            if is_recorded:
                assert self._graphs is not None
                sampled, scores = self._graphs.run(step, plan), None
            else:
                sampled, scores = steps.run(step, plan, announce, boundaries)
            self._share_drawn(step)
        on_host = HostTokens(step.sampled, sampled, plan) if step.sampled else None
        check = None if self.followers is None else self.followers.end_of_step()
        return LaunchedStep(self._device, timing, on_host, scores, check)

    def _together(
        self,
        step: PackedStep,
        changes: RowChanges | None,
        announce: Announce | None,
        boundaries: Collection[int],
        is_recorded: bool,
    ) -> AbstractContextManager[Announce | None]:
        """Let the other ranks, where there are some, compute a step beside the body."""
        if self.followers is None:
            return nullcontext(announce)
        parts = step, changes, self._steps.batch_rows, announce, boundaries
        return self.followers.step(*parts, is_recorded=is_recorded)

    def _share_drawn(self, step: PackedStep) -> None:
        """Give the tokens that a step draws to the next one of every rank."""
        if self._rank is not None and step.sampled_ends:
            self._rank.share(self._steps.batch_rows.drawn)

    @torch.inference_mode()
    def follow(self, message: "StepMessage") -> None:
        """Compute this rank's part of a step of rank 0."""
        assert self._rank is not None
        steps, rank, step = self._steps, self._rank, message.step()

        def meet(num_layers: int) -> None:
            self.marks.record((message.number, num_layers))
            rank.meet()

        with self._on_stream():
            steps.batch_rows.apply(message.changes())
            if message.is_recorded:
                assert self._graphs is not None
                self._graphs.follow(step)
            else:
                steps.follow(step, message.scored, meet, message.boundaries)
            self._share_drawn(step)
            self.marks.record((message.number, ALL_LAYERS))

    def _clear(self, block_ids: list[int]) -> None:
        if block_ids:
            index = torch.tensor(block_ids, device=self._device)
            self.kv_cache.tensor.index_fill_(0, index, 0)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Launch the work within on this runner's device, in stream order."""
        if self._stream is None:
            yield
            return
        torch.cuda.set_device(self._device)  # per thread, and Triton launches on the current
        with torch.cuda.stream(self._stream):
            yield


def _announce_layers(on_layers: OnLayers, device: torch.device, num_layers: int) -> None:
    event = None
    if device.type == "cuda":
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    on_layers(num_layers, event)
