"""KV between workers of different tensor-parallel widths: the arithmetic, in memory."""

import ctypes
from collections import Counter
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.transfer.checksum import part_checksums
from tandem.transfer.layout import ChecksumName, KvLayout, RankPair, rank_pairs
from tandem.transfer.transport import Parts

WORDS = {"float32": torch.int32, "bfloat16": torch.int16, "float16": torch.int16}

num_heads = st.sampled_from([1, 2, 4, 8, 16, 24])
widths = st.sampled_from([1, 2, 4, 8])
layouts = st.builds(
    KvLayout,
    num_layers=st.integers(1, 4),
    num_kv_heads=num_heads,
    block_size=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([2, 4]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
)


def whole_block(layout: KvLayout) -> torch.Tensor:
    """[num_layers, 2, num_kv_heads, block_size, head_dim], no two elements of which are equal."""
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1).to(WORDS[layout.dtype]).view(shape)


def rank_blocks(block: torch.Tensor, tp_size: int) -> list[torch.Tensor]:
    """Return each rank's part of a block: an even share of its heads, in order.

    Where ranks outnumber heads, neighboring ranks have a replica each of the same head.
    """
    num_replicas = max(1, tp_size // block.shape[2])
    shares = block.chunk(tp_size // num_replicas, dim=2)
    return [
        share.clone(memory_format=torch.contiguous_format)
        for share in shares
        for _ in range(num_replicas)
    ]


def move(source: torch.Tensor, theirs: Parts, target: torch.Tensor, ours: Parts) -> None:
    for (begin, length), (to, as_long) in zip(theirs, ours, strict=True):
        assert length == as_long > 0
        assert begin + length <= source.nbytes and to + length <= target.nbytes
        ctypes.memmove(target.data_ptr() + to, source.data_ptr() + begin, length)


def own_heads(num_heads: int, tp_size: int, rank: int) -> range:
    first = rank * num_heads // tp_size
    return range(first, first + max(1, num_heads // tp_size))


def taken(heads: range, num_heads: int, tp_size: int, rank: int) -> list[int]:
    """The heads of the model that are these of a rank."""
    return list(own_heads(num_heads, tp_size, rank)[heads.start : heads.stop])


@given(num_heads, widths, widths)
def test_every_head_is_written_once_into_every_rank_that_has_it(
    num_heads: int, prefill_tp: int, decode_tp: int
) -> None:
    found: dict[int, list[int]] = {rank: [] for rank in range(decode_tp)}
    for ranks in rank_pairs(num_heads, prefill_tp, decode_tp):
        sent = taken(ranks.prefill_heads, num_heads, prefill_tp, ranks.prefill_rank)
        assert len(sent) == len(ranks.prefill_heads) > 0
        assert sent == taken(ranks.decode_heads, num_heads, decode_tp, ranks.decode_rank)
        found[ranks.decode_rank] += sent
    assert found == {rank: list(own_heads(num_heads, decode_tp, rank)) for rank in range(decode_tp)}


@given(num_heads, widths, widths)
def test_replicas_share_the_writes_and_what_is_read_goes_the_other_way(
    num_heads: int, prefill_tp: int, decode_tp: int
) -> None:
    pairs = rank_pairs(num_heads, prefill_tp, decode_tp)
    busy = Counter(ranks.prefill_rank for ranks in pairs)
    assert len(set(busy.values())) == 1
    assert len(busy) == min(prefill_tp, max(num_heads, decode_tp))
    layout = KvLayout(1, num_heads, 1, 1, "float32", tp_size=decode_tp)
    assert layout.rank_pairs_from(prefill_tp) == pairs
    read = layout.read_pairs_from(prefill_tp)
    assert read == tuple(p.reversed() for p in rank_pairs(num_heads, decode_tp, prefill_tp))
    assert set(read) <= set(pairs) or set(pairs) <= set(read)  # no further connections


@settings(max_examples=50)
@given(layouts, widths, widths, st.data())
def test_spans_of_layers_of_every_stream_put_each_head_of_each_layer_in_its_place_once(
    layout: KvLayout, prefill_tp: int, decode_tp: int, data: st.DataObject
) -> None:
    block = whole_block(layout)
    source = rank_blocks(block, prefill_tp)
    target = [torch.zeros_like(share) for share in rank_blocks(block, decode_tp)]
    num_moved = 0
    ends = data.draw(st.sets(st.integers(1, layout.num_layers))) | {layout.num_layers}
    boundaries = sorted(ends)
    for ranks in rank_pairs(layout.num_kv_heads, prefill_tp, decode_tp):
        for begin, end in zip([0, *boundaries], boundaries, strict=False):
            theirs, ours = cut(layout, ranks, (prefill_tp, decode_tp), boundaries, (begin, end))
            before = target[ranks.decode_rank].clone()
            move(source[ranks.prefill_rank], theirs, target[ranks.decode_rank], ours)
            changed = target[ranks.decode_rank] != before
            assert not changed[:begin].any() and not changed[end:].any()
            num_moved += int(changed.sum())
    expected = rank_blocks(block, decode_tp)
    assert num_moved == sum(share.numel() for share in expected)
    assert all(torch.equal(*shares) for shares in zip(target, expected, strict=True))


def cut(
    layout: KvLayout,
    ranks: RankPair,
    tp_sizes: tuple[int, int],
    boundaries: list[int],
    layers: tuple[int, int],
) -> tuple[Parts, Parts]:
    """The pieces of both sides' blocks, as the tables of descriptors are made of them."""
    p, d = (replace(layout, tp_size=tp_size) for tp_size in tp_sizes)
    if p.heads_per_rank == d.heads_per_rank:
        index = boundaries.index(layers[1])
        part = p.layer_parts(boundaries)[index : index + 1]
        return part, part
    pieces = slice(2 * layers[0], 2 * layers[1])
    return p.head_parts(ranks.prefill_heads)[pieces], d.head_parts(ranks.decode_heads)[pieces]


@settings(max_examples=50)
@given(layouts, widths, widths, st.data(), st.sampled_from(["xxh3", "mix64"]))
def test_both_ends_of_a_stream_checksum_the_same_bytes_in_the_same_order(
    layout: KvLayout, prefill_tp: int, decode_tp: int, data: st.DataObject, name: ChecksumName
) -> None:
    end = data.draw(st.integers(1, layout.num_layers))
    layers = range(data.draw(st.integers(0, end - 1)), end)
    block = whole_block(layout)
    source, target = rank_blocks(block, prefill_tp), rank_blocks(block, decode_tp)
    p, d = replace(layout, tp_size=prefill_tp), replace(layout, tp_size=decode_tp)
    for ranks in rank_pairs(layout.num_kv_heads, prefill_tp, decode_tp):
        ours = p.span_parts(ranks.prefill_heads, layers)
        theirs = d.span_parts(ranks.decode_heads, layers)
        pool = source[ranks.prefill_rank][None], target[ranks.decode_rank][None]
        sums = part_checksums(pool[0], [0], ours, name)
        assert part_checksums(pool[1], [0], theirs, name) == sums
        offset, _ = theirs[0]
        pool[1].view(-1).view(torch.uint8)[offset] ^= 1
        assert part_checksums(pool[1], [0], theirs, name) != sums
        pool[1].view(-1).view(torch.uint8)[offset] ^= 1
