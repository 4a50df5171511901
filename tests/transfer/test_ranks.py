"""KV between workers of different tensor-parallel widths: the arithmetic, and real transfers."""

import asyncio
import ctypes
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.runtime.messages import Claim, Claimed, FirstToken, SamplingParams
from tandem.transfer.checksum import part_checksums
from tandem.transfer.group import TransferGroup, WriteOrder
from tandem.transfer.handoff.actions import Admit, Verify
from tandem.transfer.handoff.decode import DecodeHandoff, HandoffState
from tandem.transfer.handoff.landed import decode_landed
from tandem.transfer.handoff.prefill import PostedWrite, PrefillHandoff
from tandem.transfer.layout import ChecksumName, KvLayout, RankPair, rank_pairs
from tandem.transfer.transport import Parts
from tests.transfer.pools import Pool

MakePool = Callable[..., Pool]

WORDS = {"float32": torch.int32, "bfloat16": torch.int16, "float16": torch.int16}
LAYOUT = KvLayout(num_layers=3, num_kv_heads=4, block_size=4, head_dim=8, dtype="float16")
WIDTHS = [(2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (1, 4), (4, 1)]

layouts = st.builds(
    KvLayout,
    num_layers=st.integers(1, 4),
    num_kv_heads=st.sampled_from([8, 16, 24]),
    block_size=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([2, 4]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
)
widths = st.sampled_from([1, 2, 4, 8])


def whole_block(layout: KvLayout) -> torch.Tensor:
    """[num_layers, 2, num_kv_heads, block_size, head_dim], no two elements of which are equal."""
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1).to(WORDS[layout.dtype]).view(shape)


def rank_blocks(block: torch.Tensor, tp_size: int) -> list[torch.Tensor]:
    """What each of the ranks holds of a block: an even share of its heads, in order."""
    return [share.contiguous() for share in block.chunk(tp_size, dim=2)]


def move(source: torch.Tensor, theirs: Parts, target: torch.Tensor, ours: Parts) -> None:
    for (begin, length), (to, as_long) in zip(theirs, ours, strict=True):
        assert length == as_long > 0
        assert begin + length <= source.nbytes and to + length <= target.nbytes
        ctypes.memmove(target.data_ptr() + to, source.data_ptr() + begin, length)


def taken(heads: Iterable[int], rank: int, heads_per_rank: int) -> list[int]:
    return [rank * heads_per_rank + head for head in heads]


@given(st.integers(1, 5), widths, widths)
def test_every_head_goes_over_one_stream_from_the_rank_that_has_it_to_the_rank_that_wants_it(
    multiple: int, prefill_tp: int, decode_tp: int
) -> None:
    num_heads = multiple * max(prefill_tp, decode_tp)
    per_prefill, per_decode = num_heads // prefill_tp, num_heads // decode_tp
    heads: list[int] = []
    for ranks in rank_pairs(num_heads, prefill_tp, decode_tp):
        sent = taken(ranks.prefill_heads, ranks.prefill_rank, per_prefill)
        assert sent == taken(ranks.decode_heads, ranks.decode_rank, per_decode)
        assert 0 <= ranks.prefill_heads.start < ranks.prefill_heads.stop <= per_prefill
        assert 0 <= ranks.decode_heads.start < ranks.decode_heads.stop <= per_decode
        heads += sent
    assert heads == list(range(num_heads))


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
    assert num_moved == block.numel()
    assert torch.equal(torch.cat(target, dim=2), block)


def cut(
    layout: KvLayout,
    ranks: RankPair,
    tp_sizes: tuple[int, int],
    boundaries: list[int],
    layers: tuple[int, int],
) -> tuple[Parts, Parts]:
    """The pieces of both sides' blocks, as the tables of descriptors are made of them."""
    p, d = (replace(layout, tp_size=tp_size) for tp_size in tp_sizes)
    if p.tp_size == d.tp_size:
        index = boundaries.index(layers[1])
        part = p.layer_parts(boundaries)[index : index + 1]
        return part, part
    pieces = slice(2 * layers[0], 2 * layers[1])
    return p.head_parts(ranks.prefill_heads)[pieces], d.head_parts(ranks.decode_heads)[pieces]


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


class Handover:
    """Both machines of one handoff: source blocks 1, 2, 3 go to blocks 5, 3, 6."""

    pairs = ((1, 5), (2, 3), (3, 6))
    boundaries = (1, 3)

    def __init__(self, prefill_tp: int, decode_tp: int) -> None:
        handoff_id = bytes([prefill_tp, decode_tp]) * 8
        self.rank_pairs = rank_pairs(LAYOUT.num_kv_heads, prefill_tp, decode_tp)
        self.block_of = dict(enumerate(local for local, _ in self.pairs))
        fill = [(ordinal, remote) for ordinal, (_, remote) in enumerate(self.pairs)]
        grant = Claimed(b"s" * 16, 60_000, b"", SamplingParams(), fill, [])
        now = time.perf_counter()
        self.d = DecodeHandoff(
            handoff_id,
            1,
            grant,
            deadline=now + 60,
            grace_ms=100,
            num_layers=LAYOUT.num_layers,
            tp_size=decode_tp,
        )
        self.d.published()
        assert self.d.claim(Claim(handoff_id, 1, "p", "e1", prefill_tp), now) is grant
        assert not self.d.first_token(FirstToken(handoff_id, 1, grant.secret, b"", 7))
        self.p = PrefillHandoff(
            handoff_id,
            1,
            grant,
            claim_sent_at=now,
            margin_ms=10,
            num_layers=LAYOUT.num_layers,
            rank_pairs=self.rank_pairs,
        )

    async def run(
        self,
        write: Callable[[PostedWrite, list[tuple[int, int]]], Any],
        hear: Callable[[], Any],
        checksums: Callable[[RankPair, range, list[int]], Any],
    ) -> None:
        """`write` posts one and gives the notice sent, `hear` gives (decode rank, message)."""
        for begin, end in zip((0, *self.boundaries), self.boundaries, strict=False):
            writes = self.p.post(list(self.block_of), range(begin, end), time.perf_counter())
            for posted, notice in zip(
                writes, await asyncio.gather(*(self._write(w, write) for w in writes)), strict=True
            ):
                self.p.completed(posted, notice)
        num_notices = len(self.rank_pairs) * len(self.boundaries)
        num_unproven = num_notices * len(self.pairs)
        for _ in range(num_notices):
            rank, message = await hear()
            landed = decode_landed(message)
            assert landed is not None
            (verify,) = self.d.landed(landed, time.perf_counter(), rank)
            assert isinstance(verify, Verify) and verify.span.decode_rank == rank
            (ranks,) = [
                s
                for s in self.rank_pairs
                if (s.prefill_rank, s.decode_rank) == (verify.span.prefill_rank, rank)
            ]
            block_ids = [block_id for _, block_id, _ in verify.blocks]
            sums = await checksums(ranks, verify.span.layers, block_ids)
            for (ordinal, _, announced), found in zip(verify.blocks, sums, strict=True):
                assert self.d.state is HandoffState.WRITING
                num_unproven -= 1
                admitted = self.d.verified(verify.span, ordinal, found == announced)
                assert [type(action) for action in admitted] == ([] if num_unproven else [Admit])
            self.d.check_invariants()
        assert self.d.state is HandoffState.ADMITTED
        self.p.check_invariants()
        assert not self.p.pinned and self.p.num_completed == num_notices

    async def _write(self, posted: PostedWrite, write: Callable[..., Any]) -> bytes:
        local = [self.block_of[ordinal] for ordinal in posted.ordinals]
        notice: bytes = await write(posted, list(zip(local, posted.remote_blocks, strict=True)))
        return notice


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] of a worker, as raw bytes."""
    return torch.cat([tensor.view(torch.int16) for tensor in tensors], dim=3)


def assert_arrived(source: torch.Tensor, target: torch.Tensor) -> None:
    for local, remote in Handover.pairs:
        assert torch.equal(source[local], target[remote])
    untouched = sorted(set(range(len(target))) - {remote for _, remote in Handover.pairs})
    assert not target[untouched].any()


@pytest.mark.parametrize("widths", WIDTHS, ids=lambda pair: f"{pair[0]}to{pair[1]}")
async def test_ranks_hand_over_their_heads_between_agents(
    widths: tuple[int, int], make_pool: MakePool, start_group: Callable[..., Any]
) -> None:
    heard: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
    p_layout, d_layout = (replace(LAYOUT, tp_size=tp_size) for tp_size in widths)
    p_pools = [make_pool(4, p_layout) for _ in range(widths[0])]
    d_pools = [make_pool(8, d_layout, fill="zero") for _ in range(widths[1])]
    p: TransferGroup = await start_group("p", p_pools, p_layout)
    d: TransferGroup = await start_group("d", d_pools, d_layout, heard=heard)
    link = await p.connect(d.metadata())
    assert d.rank_pairs_from(widths[0]) == link.rank_pairs
    handover = Handover(*widths)
    d.expect(+1)

    async def write(posted: PostedWrite, pairs: list[tuple[int, int]]) -> bytes:
        order = WriteOrder(
            posted.ranks,
            posted.layers,
            pairs,
            lambda sums: handover.p.landed_notice(posted, sums),
            handover.boundaries,
            posted.post_before,
        )
        return await p.write(link, order)

    await handover.run(write, heard.get, d.checksums)
    source = joined([pool.tensor for pool in p_pools])
    assert_arrived(source, joined([pool.tensor for pool in d_pools]))
    blocks = [remote for _, remote in handover.pairs]
    back = [(local, remote) for local, (_, remote) in enumerate(handover.pairs)]
    for pool in p_pools:
        pool.tensor.zero_()
    for ranks in link.rank_pairs:  # and pulled back, they are what they were
        found = await p.read(link, ranks, back)
        assert found == await d.checksums(ranks, range(LAYOUT.num_layers), blocks)
    assert torch.equal(joined([pool.tensor for pool in p_pools])[:3], source[1:])
