"""The PyTorch twin of tandem.kernels.paged_attention."""

import torch
import torch.nn.functional as F

from tandem.kernels.reference.gather import gather_context


def paged_decode_attention(
    q: torch.Tensor,  # [num_seqs * queries_per_seq, num_heads, head_dim]
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    block_tables: torch.Tensor,  # [num_seqs, max_blocks] (seq, ordinal) |-> block_id
    context_lens: torch.Tensor,  # [num_seqs] positions attended, the queries' own included
    scale: float,
    out: torch.Tensor,  # [num_seqs * queries_per_seq, num_heads, head_dim]
    *,
    queries_per_seq: int = 1,
    soft_cap: float = 0.0,
    window: int = 0,
) -> None:
    """The last `queries_per_seq` tokens of each sequence attend causally over its context.

    Unlike the kernel, the twin multiplies what it masks by zero: every block named in
    `block_tables`, padding included, must hold finite numbers.
    """
    lens: list[int] = context_lens.tolist()
    longest = max(lens, default=0)
    if longest == 0:
        out.zero_()
        return
    options = queries_per_seq, soft_cap, window
    if longest * len(lens) <= 2 * sum(lens):
        _decode_padded(q, kv_cache, block_tables, context_lens, longest, scale, out, *options)
    else:
        # Padding would be most of the work: sequences of like length go together.
        grouped = (len(lens), queries_per_seq, *q.shape[1:])
        grouped_q, grouped_out = q.view(grouped), out.view(grouped)
        buckets: dict[int, list[int]] = {}
        for row, length in enumerate(lens):
            buckets.setdefault(length.bit_length(), []).append(row)
        for rows in buckets.values():
            index = torch.tensor(rows, device=q.device)
            part_q, tables = grouped_q[index].flatten(0, 1), block_tables[index]
            part = torch.zeros_like(part_q)
            longest = max(lens[row] for row in rows)
            if longest:
                part_lens = context_lens[index]
                _decode_padded(part_q, kv_cache, tables, part_lens, longest, scale, part, *options)
            grouped_out[index] = part.view(-1, *grouped[1:])
    if 0 in lens:
        empty = (context_lens == 0).repeat_interleave(queries_per_seq)
        out.masked_fill_(empty.view(-1, 1, 1), 0.0)


def _decode_padded(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    longest: int,
    scale: float,
    out: torch.Tensor,
    queries_per_seq: int,
    soft_cap: float,
    window: int,
) -> None:
    num_seqs, num_kv_heads = context_lens.shape[0], kv_cache.shape[2]
    k, v = gather_context(kv_cache, block_tables, longest)
    # The queries and heads of one KV head stand as rows of one query: K and V are read once.
    packed = (num_seqs, queries_per_seq, num_kv_heads, q.shape[1] // num_kv_heads, q.shape[2])
    if queries_per_seq == 1:
        rows = q.view(num_seqs, *packed[2:])
    else:
        rows = q.view(packed).transpose(1, 2).flatten(2, 3)
    mask = None
    if num_seqs > 1 or queries_per_seq > 1 or window:
        visible = context_lens.view(num_seqs, 1, 1, 1)
        if queries_per_seq > 1:
            token = torch.arange(rows.shape[2], device=q.device) // packed[3]
            visible = visible + (token + 1 - queries_per_seq).view(1, 1, -1, 1)
        positions = torch.arange(longest, device=q.device)
        mask = positions < visible
        if window:
            mask &= positions >= visible - window
    if soft_cap:
        attended = _attend_capped(rows, k, v, mask, scale, soft_cap)
    else:
        attended = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
    if queries_per_seq == 1:
        out.view(rows.shape).copy_(attended)
    else:
        by_head = (num_seqs, num_kv_heads, queries_per_seq, *packed[3:])
        out.view(packed).copy_(attended.reshape(by_head).transpose(1, 2))


def _attend_capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    scores = (q.float() @ k.float().transpose(2, 3)) * scale
    scores = soft_cap * torch.tanh(scores / soft_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ v.float()).to(q.dtype)
