import asyncio
import logging
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from tandem.runtime.errors import TransferError
from tandem.transfer.agents import group as group_module
from tandem.transfer.agents.group import TransferGroup, WriteOrder
from tandem.transfer.agents.link import LinkRates
from tandem.transfer.config import TransferConfig
from tandem.transfer.layout import KvLayout
from tests.transfer.agents.groups import LOOPBACK, MakePool, Start, loopback_pair, write
from tests.transfer.pools import bits, joined, make_ranks

DEEP = KvLayout(num_layers=4, num_kv_heads=4, block_size=4, head_dim=8, dtype="float32")


@pytest.mark.parametrize(
    ("backend", "num_heads", "widths"),
    [
        # heads that are moved whole, cut and joined; then replicas of them, at either end and both
        *(("loopback", 4, widths) for widths in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1))),
        *(("loopback", 2, widths) for widths in ((4, 4), (4, 2), (2, 4), (1, 4), (4, 1))),
        *(("loopback", 1, widths) for widths in ((2, 2), (2, 4))),
        *(("nixl", *each) for each in ((4, (2, 2)), (4, (1, 4)), (2, (4, 1)))),
    ],
    ids=lambda value: f"{value[0]}to{value[1]}" if isinstance(value, tuple) else str(value),
)
async def test_groups_of_layers_arrive_one_after_the_other_and_touch_no_other_layer(
    backend: str, num_heads: int, widths: tuple[int, int], start_group: Start
) -> None:
    """From ranks to ranks; all blocks are then pulled back."""
    config = TransferConfig.model_validate({"backend": backend})
    layouts = [replace(DEEP, num_kv_heads=num_heads, tp_size=tp_size) for tp_size in widths]
    sources = make_ranks(6, layouts[0])
    targets = make_ranks(6, layouts[1], fill="zero")
    heard: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
    p: TransferGroup = await start_group("p", sources, layouts[0], config=config)
    d: TransferGroup = await start_group("d", targets, layouts[1], config=config, heard=heard)
    d.expect(+1)
    link = await p.connect(d.metadata())
    boundaries, pairs = (1, 2, 4), [(0, 5), (1, 2), (3, 3)]
    await p.prepare(link, boundaries)
    originals = [bits(source).clone() for source in sources]
    original = joined(sources, layouts[0])
    for layers in (range(1), range(1, 4)):  # the last two groups at once
        before = [bits(target).clone() for target in targets]
        for ranks in link.rank_pairs:
            sums: list[int] = []

            def notice(checksums: Any, layers: range = layers, sums: list[int] = sums) -> bytes:
                sums += checksums
                return b"%d-%d" % (layers.start, layers.stop)

            order = WriteOrder(ranks, layers, pairs, notice, boundaries)
            sent = await p.write(link, order)
            assert await heard.get() == (ranks.decode_rank, sent)
            assert await d.checksums(ranks, layers, [remote for _, remote in pairs]) == sums
        for layer in set(range(4)).difference(layers):
            for target, unwritten in zip(targets, before, strict=True):
                assert torch.equal(bits(target)[:, layer], unwritten[:, layer])
        for source in sources:
            source.tensor[:, layers.start : layers.stop].zero_()  # not to be sent again
    for local, remote in pairs:
        assert torch.equal(original[local], joined(targets, layouts[1])[remote])
    assert not any(bits(target)[[0, 1, 4]].any() for target in targets)
    assert d.layout.rank_pairs_from(widths[0]) == link.rank_pairs
    assert d.layout.read_pairs_from(widths[0]) == link.read_pairs
    for ranks in link.read_pairs:
        found = await p.read(link, ranks, pairs)
        assert found == await d.checksums(ranks, range(4), [remote for _, remote in pairs])
    for source, whole in zip(sources, originals, strict=True):
        assert torch.equal(bits(source)[[0, 1, 3]], whole[[0, 1, 3]])


@pytest.mark.parametrize("widths", [(4, 4), (4, 2), (2, 4), (1, 4), (4, 1)])
async def test_a_bit_that_differs_in_any_replica_and_a_misplaced_head_are_noticed(
    widths: tuple[int, int], make_pool: MakePool, start_group: Start
) -> None:
    layouts = [replace(DEEP, num_kv_heads=2, tp_size=tp_size) for tp_size in widths]
    sources = [make_pool(2, layouts[0]) for _ in range(widths[0])]
    targets = make_ranks(2, layouts[1], fill="zero")
    p: TransferGroup = await start_group("p", sources, layouts[0], config=LOOPBACK)
    d: TransferGroup = await start_group("d", targets, layouts[1], config=LOOPBACK)
    link = await p.connect(d.metadata())
    for ranks in link.rank_pairs:
        [announced] = await p.prefill_checksums(ranks, range(4), [0])
        elsewhere = replace(ranks, decode_heads=range(1 - ranks.decode_heads.start, 2))
        if widths[1] == 1 and elsewhere.decode_heads.start == 1:
            await p.write(link, WriteOrder(elsewhere, range(4), [(0, 1)], lambda sums: b"n"))
            assert await d.checksums(ranks, range(4), [1]) != [announced]
        await p.write(link, WriteOrder(ranks, range(4), [(0, 1)], lambda sums: b"n"))
        assert await d.checksums(ranks, range(4), [1]) == [announced]
        head = ranks.decode_heads.start
        bits(targets[ranks.decode_rank])[1, 3, 1, head, 0, 0] ^= 1
        assert await d.checksums(ranks, range(4), [1]) != [announced]


@pytest.mark.parametrize("backend", ["nixl", "loopback"])
async def test_prefix_blocks_are_pulled_and_a_source_that_changed_is_noticed(
    backend: str, make_pool: MakePool, start_group: Start
) -> None:
    config = TransferConfig.model_validate({"backend": backend})
    target, source = make_pool(8, DEEP, fill="zero"), make_pool(8, DEEP)
    p: TransferGroup = await start_group("p", [target], DEEP, config=config)
    d: TransferGroup = await start_group("d", [source], DEEP, config=config)
    d.expect(+1)
    link = await p.connect(d.metadata())
    (ranks,) = link.rank_pairs
    announced = await d.checksums(ranks, range(4), [7, 3])
    assert await p.read(link, ranks, [(0, 7), (4, 3)]) == announced
    assert torch.equal(bits(target)[[0, 4]], bits(source)[[7, 3]])
    assert not target.tensor[[1, 2, 3, 5, 6, 7]].any()
    bits(source)[3, 2, 1, 1, 3, 7] ^= 1  # the decode worker evicted the block and reuses it
    found = await p.read(link, ranks, [(0, 7), (4, 3)])
    assert found[0] == announced[0] and found[1] != announced[1]


async def test_without_verification_nothing_is_checksummed_and_all_arrives(
    make_pool: MakePool, start_group: Start
) -> None:
    config = TransferConfig(backend="loopback", verify=False)
    source, target = make_pool(4), make_pool(4, fill="zero")
    p: TransferGroup = await start_group("p", [source], config=config)
    d: TransferGroup = await start_group("d", [target], config=config)
    link = await p.connect(d.metadata())
    sums: list[int] = []

    def notice(checksums: Any) -> bytes:
        sums.extend(checksums)
        return b"n"

    await p.write(link, WriteOrder(link.rank_pairs[0], range(2), [(0, 0), (1, 1)], notice))
    assert sums == [0, 0]
    assert torch.equal(source.tensor[:2].view(torch.int16), target.tensor[:2].view(torch.int16))
    with pytest.raises(TransferError, match=r"checksum=none.*checksum=xxh3"):
        await p.connect((await start_group("e", [make_pool(4)], config=LOOPBACK)).metadata())


async def test_the_blocks_of_8k_tokens_arrive_from_anywhere_to_anywhere(
    make_pool: MakePool, start_group: Start
) -> None:
    source, target = (Random(seed).sample(range(2048), 512) for seed in (1, 2))
    small = replace(DEEP, num_layers=1, block_size=1)
    pools = make_pool(2048, small), make_pool(2048, small, fill="zero")
    p: TransferGroup = await start_group("p", [pools[0]], small)
    d: TransferGroup = await start_group("d", [pools[1]], small)
    d.expect(+1)
    link = await p.connect(d.metadata())
    await write(p, link, list(zip(source, target, strict=True)), b"notice")
    assert torch.equal(bits(pools[0])[source], bits(pools[1])[target])


# ---- measuring ----------------------------------------------------------------------------------


async def test_without_spare_blocks_nothing_is_measured_and_transfers_go(
    make_pool: MakePool, start_group: Start
) -> None:
    for num_spare_blocks in (0, 1):
        p, d = await loopback_pair(make_pool, start_group, num_spare_blocks)
        link = await p.connect(d.metadata())
        await p.measure(link)
        assert link.rates is None and not p.reports()
        await write(p, link, [(0, 0)], b"arrives")
        await p.close()
        await d.close()


async def test_a_measurement_touches_spare_blocks_only_and_is_not_heard(
    make_pool: MakePool, start_group: Start
) -> None:
    source = make_pool(8, DEEP, num_spare_blocks=4)
    target = make_pool(5, DEEP, fill="zero", num_spare_blocks=6)
    before = source.tensor.clone()
    heard: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
    p: TransferGroup = await start_group("p", [source], DEEP)
    d: TransferGroup = await start_group("d", [target], DEEP, heard=heard)
    d.expect(+1)
    link = await p.connect(d.metadata())
    await p.measure(link)
    (report,) = p.reports()
    assert report.decode_instance == "d" and report.write_bytes_per_s > 0
    assert target.tensor[5:9].any() and not target.tensor[:5].any() and not target.tensor[9:].any()
    assert torch.equal(before[:8].view(torch.int32), bits(source)[:8])
    await write(p, link, [(0, 0)], b"first heard")
    assert await heard.get() == (0, b"first heard")


async def test_rates_are_of_the_bytes_that_go_where_ranks_share_a_part_of_their_heads(
    make_pool: MakePool, start_group: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[int, int]] = []

    async def measure(spare: Any, memory: str) -> LinkRates:
        await spare.write(spare.num_blocks, spare.num_layers, checked=True)
        num_written = int(pools[0].tensor.view(torch.uint8).sum())
        measured.append((spare.num_blocks * spare.block_bytes, num_written))
        return LinkRates(1e-4, 0.0, 1e-10, 1e-10, 1e10, 0.5)

    monkeypatch.setattr(group_module, "measure", measure)
    halves = replace(DEEP, tp_size=2)
    source = make_pool(4, DEEP, num_spare_blocks=3)
    source.tensor.view(torch.uint8).fill_(1)
    pools = [make_pool(4, halves, fill="zero", num_spare_blocks=3) for _ in range(2)]
    p: TransferGroup = await start_group("p", [source], DEEP, config=LOOPBACK)
    d: TransferGroup = await start_group("d", pools, halves, config=LOOPBACK)
    await p.measure(await p.connect(d.metadata()))
    assert measured == [(3 * halves.block_bytes,) * 2]


@pytest.mark.parametrize(
    ("windows", "num_tokens"), [((0,), 16), ((0, 8, 8), 40), ((0, 0), 32), ((4,), None)]
)
async def test_a_report_says_from_how_many_tokens_on_layers_are_streamed(
    make_pool: MakePool,
    start_group: Start,
    monkeypatch: pytest.MonkeyPatch,
    windows: tuple[int, ...],
    num_tokens: int | None,
) -> None:
    layout = replace(DEEP, windows=windows)
    overhead_s = 1.5 * layout.block_bytes  # 4 blocks are worth cutting, or 16 of several kinds

    async def measure(spare: Any, memory: str) -> LinkRates:
        return LinkRates(overhead_s, 0.0, 1.0, 1.0, 1.0, 0.5)

    monkeypatch.setattr(group_module, "measure", measure)
    p: TransferGroup = await start_group(
        "p", [make_pool(8, layout, num_spare_blocks=4)], layout, config=LOOPBACK
    )
    d: TransferGroup = await start_group(
        "d", [make_pool(8, layout, num_spare_blocks=4)], layout, config=LOOPBACK
    )
    await p.measure(await p.connect(d.metadata()))
    (report,) = p.reports()
    assert report.min_streaming_tokens == num_tokens


@pytest.mark.parametrize(("expected", "is_slow"), [(1e15, True), (1.0, False)])
async def test_a_way_far_below_its_memory_s_kind_is_warned_of_once_and_no_other(
    expected: float,
    is_slow: bool,
    make_pool: MakePool,
    start_group: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(group_module, "expected_bytes_per_s", lambda pool, num_bytes: expected)
    caplog.set_level(logging.WARNING)
    p, d = await loopback_pair(make_pool, start_group, num_spare_blocks=128)
    await p.measure(await p.connect(d.metadata()))
    warnings = [record.getMessage() for record in caplog.records if "likely" in record.msg]
    assert len(warnings) == is_slow
    assert all(warning.startswith("KV from p to d goes at") for warning in warnings)
    caplog.clear()
    p, d = await loopback_pair(make_pool, start_group, num_spare_blocks=2)
    await p.measure(await p.connect(d.metadata()))
    assert not [
        record for record in caplog.records if "likely" in record.msg
    ]  # nothing of 16 KiB shows a rate
