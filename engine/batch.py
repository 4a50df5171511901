"""One step's work as tensors: built once, passed down."""

from array import array
from dataclasses import dataclass

import torch

from tandem.engine.sequence import Chunk


@dataclass(slots=True, frozen=True)
class Batch:
    """Chunks of one token (decodes) come first, then the longer ones (prefills)."""

    token_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    slot_mapping: torch.Tensor  # [num_tokens] token |-> block_id * block_size + offset
    num_decodes: int
    decode_context_lens: torch.Tensor  # [num_decodes]
    decode_block_tables: torch.Tensor  # [num_decodes, max_blocks]
    num_prefills: int
    max_query_len: int  # of the prefills
    prefill_context_lens: torch.Tensor  # [num_prefills]
    prefill_cu_seqlens: torch.Tensor  # [num_prefills + 1], 0 is the first prefill token
    prefill_block_tables: torch.Tensor  # [num_prefills, max_blocks]
    logits_indices: torch.Tensor  # [num_samples] tokens whose logits are wanted, in chunk order
    started_blocks: torch.Tensor  # [n] block ids first written by this step, and not filled


def build_batch(chunks: list[Chunk], block_size: int, device: torch.device) -> Batch:
    """The tensors of `chunks`. The caller owns the sequences; nothing of them is kept."""
    decodes = [chunk for chunk in chunks if chunk.end - chunk.start == 1]
    prefills = [chunk for chunk in chunks if chunk.end - chunk.start > 1]
    ordered = decodes + prefills
    cu_seqlens, num_tokens = [0], len(decodes)
    for chunk in prefills:
        cu_seqlens.append(cu_seqlens[-1] + chunk.end - chunk.start)
    num_tokens += cu_seqlens[-1]
    decode_tables, decode_width = _padded_tables(decodes, block_size)
    prefill_tables, prefill_width = _padded_tables(prefills, block_size)
    sections = [
        _token_ids(ordered),
        [position for chunk in ordered for position in range(chunk.start, chunk.end)],
        _slot_mapping(ordered, block_size),
        [chunk.end for chunk in decodes],
        decode_tables,
        [chunk.end for chunk in prefills],
        cu_seqlens,
        prefill_tables,
        _logits_indices(chunks, len(decodes)),
        _started_blocks(chunks, block_size),
    ]
    # One buffer, one copy to the device, one tensor per section.
    flat = array("q")
    for section in sections:
        flat.extend(section)
    packed = torch.frombuffer(flat, dtype=torch.int64).to(device)
    parts = packed.split_with_sizes([len(section) for section in sections])
    return Batch(
        token_ids=parts[0],
        positions=parts[1],
        slot_mapping=parts[2],
        num_decodes=len(decodes),
        decode_context_lens=parts[3],
        decode_block_tables=parts[4].view(len(decodes), decode_width),
        num_prefills=len(prefills),
        max_query_len=max((chunk.end - chunk.start for chunk in prefills), default=0),
        prefill_context_lens=parts[5],
        prefill_cu_seqlens=parts[6],
        prefill_block_tables=parts[7].view(len(prefills), prefill_width),
        logits_indices=parts[8],
        started_blocks=parts[9],
    )


def _token_ids(chunks: list[Chunk]) -> list[int]:
    token_ids: list[int] = []
    for chunk in chunks:
        token_ids += chunk.seq.token_ids[chunk.start : chunk.end]
    return token_ids


def _slot_mapping(chunks: list[Chunk], block_size: int) -> list[int]:
    slots: list[int] = []
    for chunk in chunks:
        table = chunk.seq.block_table
        slots += [
            table[position // block_size] * block_size + position % block_size
            for position in range(chunk.start, chunk.end)
        ]
    return slots


def _padded_tables(chunks: list[Chunk], block_size: int) -> tuple[list[int], int]:
    """Rows of equal width, flat; a row is padded with its own first block."""
    width = max((-(-chunk.end // block_size) for chunk in chunks), default=1)
    flat: list[int] = []
    for chunk in chunks:
        table = chunk.seq.block_table[: -(-chunk.end // block_size)]
        flat += table
        flat += table[:1] * (width - len(table))
    return flat, width


def _logits_indices(chunks: list[Chunk], num_decodes: int) -> list[int]:
    """The row of each sampling chunk's last token, in the order of `chunks`."""
    indices: list[int] = []
    next_decode, next_prefill = 0, num_decodes
    for chunk in chunks:
        length = chunk.end - chunk.start
        if length == 1:
            last = next_decode
            next_decode += 1
        else:
            next_prefill += length
            last = next_prefill - 1
        if chunk.samples:
            indices.append(last)
    return indices


def _started_blocks(chunks: list[Chunk], block_size: int) -> list[int]:
    started: list[int] = []
    for chunk in chunks:
        ordinal, num_used = divmod(chunk.end, block_size)
        if num_used and chunk.start <= ordinal * block_size:
            started.append(chunk.seq.block_table[ordinal])
    return started
