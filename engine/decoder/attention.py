"""Attention of a batch over one layer's paged keys and values, by the kernels."""

from collections.abc import Mapping
from typing import Any

import torch

from tandem.engine.batch.batch import Batch, Rows
from tandem.engine.decoder.kernel_set import Kernels, StepOptions


def attention_options(window: int, soft_cap: float, sinks: torch.Tensor | None) -> dict[str, Any]:
    """Return the options of both attentions of a layer that differ from the kernels' defaults."""
    options: dict[str, Any] = {}
    if window:
        options["window"] = window
    if soft_cap:
        options["soft_cap"] = soft_cap
    if sinks is not None:
        options["sinks"] = sinks.float()
    return options


def attend_all(
    kernels: Kernels,
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    batch: Batch,
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    scale: float,
    of_layer: Mapping[str, Any],  # attention_options
    of_step: StepOptions,
) -> torch.Tensor:
    """Return [num_tokens, num_heads, head_dim], the attention of every token of a batch."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_decodes, prefills = len(batch.decodes), batch.prefills
    q_of_decodes = q_of_prefills = q
    out_of_decodes = out_of_prefills = out
    if num_decodes and len(prefills):  # every layer comes here, and slices are not free
        q_of_decodes, q_of_prefills = q.tensor_split((num_decodes,))
        out_of_decodes, out_of_prefills = out.tensor_split((num_decodes,))
    if num_decodes:
        attend_last(
            kernels,
            q_of_decodes,
            batch.decodes,
            kv_cache,
            scale,
            out_of_decodes,
            of_layer,
            of_step.paged_decode_attention,
        )
    if len(prefills):
        kernels.prefill_attention(
            q_of_prefills,
            kv_cache,
            prefills.block_tables,
            batch.prefill_cu_seqlens,
            prefills.context_lens,
            batch.max_query_len,
            scale,
            out_of_prefills,
            **of_layer,
            **of_step.prefill_attention,
        )
    return out


def attend_last(
    kernels: Kernels,
    q: torch.Tensor,  # [num_seqs, num_heads, head_dim]
    rows: Rows,  # num_seqs
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    scale: float,
    out: torch.Tensor,  # [num_seqs, num_heads, head_dim]
    of_layer: Mapping[str, Any],  # attention_options
    of_step: Mapping[str, Any],
) -> None:
    """Let the last token of each sequence attend over its context."""
    if len(rows):
        kernels.paged_decode_attention(
            q,
            kv_cache,
            rows.block_tables,
            rows.context_lens,
            scale,
            out,
            **of_layer,
            **of_step,
        )
