"""The engine's configuration."""

import os
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["auto", "bfloat16", "float16", "float32"]

# What computes the steps. An emulated GPU is one, though its KV pool is in host memory.
DeviceKind = Literal["gpu", "cpu"]

STEP_TOKENS: dict[DeviceKind, int] = {"gpu": 8192, "cpu": 2048}  # most of one step
# Of a worker that begins as decode worker alone: a placement, and an answer that was handed over,
# wait for the end of a step of local prompts.
DECODE_STEP_TOKENS = 2048
CHUNK_TOKENS: dict[DeviceKind, int] = {"gpu": 2048, "cpu": 512}  # of prompts, beside decodes
TILE_TOKENS: dict[DeviceKind, int] = {"gpu": 128, "cpu": 1}  # that a step's products are padded to


class EngineConfig(BaseModel):
    """Model, device, memory and limits of one worker's engine; the same for both roles."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(default="", description="folder of the model")
    model_impl: Literal["auto", "native", "transformers"] = Field(
        default="auto",
        description="code of the model: Tandem's or transformers'; auto: Tandem's where it has it",
    )
    dtype: Dtype = Field(
        default="auto", description="auto: config.json's on a GPU, float32 on a CPU"
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda:\d+(,\d+)*)$",
        description="auto: cuda:0 where there is one. Of ranks the first's, which the next follow, "
        "or as in cuda:0,2 one for each",
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="tokens per KV block; None: 64 on a GPU, 16 on a CPU",
    )
    num_blocks: int | None = Field(default=None, ge=1, description="overrides the memory budgets")
    kv_memory_fraction: float = Field(
        default=0.85, gt=0, le=1, description="of a GPU's memory, with weights and steps"
    )
    kv_memory_bytes: int = Field(
        default=256 * 2**20, ge=1, description="KV pool on a machine without a GPU"
    )
    max_num_seqs: int = Field(default=128, ge=1, description="sequences in one step")
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens in one step; None: 8192 on a GPU, 2048 on a CPU and for a worker that "
        "begins as decode worker",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="tokens of prompt and answer; None: what the model and KV hold",
    )
    prefill_chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="most prompt tokens of one step while decodes run; None: 2048 on a GPU, 512 on "
        "a CPU",
    )
    max_step_ms: float | None = Field(
        default=None,
        gt=0,
        description="longest a step with decodes may take, by the size of prompt chunks in it; "
        "None: 50 on a GPU, 250 on a CPU",
    )
    overlap: bool | None = Field(
        default=None,
        description="schedule a step while the one before it runs; None: on a GPU",
    )
    cuda_graphs: bool = Field(
        default=True, description="replay decode steps as CUDA graphs; no effect on a CPU"
    )
    deterministic: bool = Field(
        default=False,
        description="one order of sums whatever else a step computes, by Tandem's products instead "
        "of cuBLAS's; set it on all workers of a model. On a CPU it is so in any case",
    )
    fused_products: bool = Field(
        default=False,
        description="up to 64 tokens of a step are multiplied by Tandem's products, with norms, "
        "activations and sums in them: 5 kernels a layer instead of 9, on GPUs from sm_90 on. "
        "`deterministic` fuses them for any number of tokens",
    )
    dependent_launch: bool = Field(
        default=False,
        description="begin a kernel of a decode step while the one before it ends (CUDA's "
        "programmatic dependent launch), on GPUs from sm_90 on; no effect on others",
    )
    cascade_attention: bool = Field(
        default=False,
        description="sequences of a decode step that share blocks at the head of their prompts "
        "read them together, in layers without a window. Sums then run in an order that depends on "
        "the rest of the step, so not with `deterministic`; no effect on a CPU",
    )
    float8_products: bool = Field(
        default=False,
        description="layers whose files have FP8 weights, and say that activations are rounded to "
        "FP8 as they come, are multiplied so, FP8 by FP8, on GPUs from sm_89 on. It changes what "
        "the model computes: workers with and without it do not work together. No effect on a CPU",
    )
    enable_prefix_cache: bool = Field(default=True, description="reuse KV of equal prompt heads")
    emulate: str | None = Field(
        default=None,
        min_length=1,
        description="emulate a device, as in h100/llama-3.1-8b or a profile's file: steps take its "
        "time and compute nothing; the model's folder gives the tokenizer",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="torch threads of each rank; None: half the cores for all ranks, at least 1",
    )
    tp: int = Field(
        default=1,
        ge=1,
        le=8,
        description="processes that compute the model together, each with a share of its heads, "
        "widths and vocabulary (tensor parallelism): on CPUs, or on a GPU each",
    )
    tp_invariant: bool | None = Field(
        default=None,
        description="add up in an order that no `tp` changes: all widths give the same bits. Off: "
        "in the order of its own `tp`, and it works with workers of the same `tp` alone. None: on "
        "a CPU",
    )
    kernels: Literal["auto", "c", "torch", "triton"] = Field(
        default="auto",
        description="auto: triton on a GPU; on a CPU c, or torch where there is no C compiler",
    )

    @model_validator(mode="after")
    def _sums_have_one_order(self) -> Self:
        if self.deterministic and self.cascade_attention:
            raise ValueError(
                "deterministic and cascade_attention exclude each other: the second adds up in an "
                "order that depends on the rest of the step"
            )
        return self

    def with_step_tokens(self, default: int, beside: int | None = None) -> "EngineConfig":
        """Return the configuration with the tokens of a step, and those of prompts beside decodes.

        They are the configured ones, or these.
        """
        update = {
            "max_num_batched_tokens": self.max_num_batched_tokens or default,
            "prefill_chunk_tokens": self.prefill_chunk_tokens or beside,
        }
        return self.model_copy(update=update)

    def num_threads(self) -> int:
        """Return the number of torch threads: `threads`, or the default on this machine."""
        if self.threads is not None:
            return self.threads
        return max(1, len(os.sched_getaffinity(0)) // (2 * self.tp))


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the sizes to pad decode steps to: at most 7 rows of padding, or 15 above 64."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]
