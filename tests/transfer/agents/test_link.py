from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tandem.transfer.agents.link import GROUP_COUNTS, LinkRates

BLOCK_BYTES = 28 * 65_536  # of Qwen3-0.6B
NUM_LAYERS = 28
# Two processes on a small machine, and an H200 over CUDA IPC.
HOST = LinkRates(3e-4, 1e-6, 3e-10, 3e-10, 5e9, 0.5)
GPU = LinkRates(4e-5, 2e-7, 7e-13, 7e-13, 1.5e12, 0.1)

rates = st.builds(
    LinkRates,
    overhead_s=st.floats(1e-7, 1e-2),
    descriptor_s=st.floats(0, 1e-4),
    s_per_byte=st.floats(1e-13, 1e-8),
    read_s_per_byte=st.floats(1e-13, 1e-8),
    wire_bytes_per_s=st.floats(1e7, 1e12),
    core_share=st.floats(0, 1),
)
sizes = st.tuples(st.integers(1, 4096), st.sampled_from([4096, 65_536, BLOCK_BYTES]))
FEW = settings(max_examples=40)


def test_a_transfer_takes_its_overhead_its_descriptors_and_its_bytes() -> None:
    link = LinkRates(1.0, 0.25, 2.0, 3.0, 1.0, 0.0)
    assert link.write_s(10) == 1.0 + 0.25 + 20.0
    assert link.write_s(10, 4) == 1.0 + 1.0 + 20.0
    assert link.read_s(10, 4) == 2.0 + 1.0 + 30.0  # and the question for its checksums


def test_what_is_exposed_is_the_last_group_and_what_the_others_take_from_computing() -> None:
    link = LinkRates(1.0, 0.5, 2.0, 3.0, 1.0, 0.25)
    assert link.exposed_s(1, 4, 8) == link.write_s(32)  # adjacent blocks are one descriptor
    group_s = link.write_s(8, 4)  # cut blocks are not adjacent
    assert link.exposed_s(4, 4, 8) == group_s + 3 * 0.25 * group_s


def test_a_group_of_layers_is_two_writes_where_blocks_hold_different_layers() -> None:
    link = LinkRates(1.0, 0.5, 2.0, 3.0, 1.0, 0.25)
    assert link.exposed_s(1, 4, 8, num_kinds=7) == link.write_s(32)
    group_s = link.write_s(8, 4) + 1.0
    assert link.exposed_s(4, 4, 8, num_kinds=7) == group_s + 3 * 0.25 * group_s
    assert replace(link, overhead_s=0.0, core_share=0.0).num_groups(64, 64, 1, num_kinds=4) == 4


@FEW
@given(rates, sizes, st.integers(1, 80))
def test_the_groups_chosen_are_never_later_than_no_streaming_nor_more_than_the_layers(
    link: LinkRates, size: tuple[int, int], num_layers: int
) -> None:
    num_groups = link.num_groups(*size, num_layers)
    assert num_groups in GROUP_COUNTS and num_groups <= num_layers
    assert link.exposed_s(num_groups, *size) <= link.exposed_s(1, *size)


@FEW
@given(rates, sizes)
def test_where_computing_stands_still_for_transfers_nothing_is_streamed(
    link: LinkRates, size: tuple[int, int]
) -> None:
    assert replace(link, core_share=1.0).num_groups(*size, NUM_LAYERS) == 1


@FEW
@given(rates, sizes)
def test_one_layer_is_not_streamed(link: LinkRates, size: tuple[int, int]) -> None:
    assert link.num_groups(*size, 1) == 1
    assert link.min_streaming_blocks(size[1], 1) is None


@pytest.mark.parametrize("link", [HOST, GPU], ids=["host", "gpu"])
def test_short_prompts_go_whole_and_long_ones_in_ever_more_groups(link: LinkRates) -> None:
    counts = [link.num_groups(1 << n, BLOCK_BYTES, NUM_LAYERS) for n in range(12)]
    assert counts == sorted(counts)
    assert counts[-1] > 1
    assert link.num_groups(1, 4096, NUM_LAYERS) == 1


@FEW
@given(rates, st.integers(1, 2048), st.integers(1, 2048), st.sampled_from([4096, BLOCK_BYTES]))
def test_more_bytes_never_go_in_fewer_groups(
    link: LinkRates, few: int, more: int, block_bytes: int
) -> None:
    # Else a single block, which is one descriptor either way, may be all that is worth cutting.
    assume(link.descriptor_s <= link.core_share * link.overhead_s)
    few, more = min(few, more), max(few, more)
    groups = [link.num_groups(count, block_bytes, NUM_LAYERS) for count in (few, more)]
    assert groups == sorted(groups)


@FEW
@given(rates, st.sampled_from([4096, 65_536, BLOCK_BYTES]), st.integers(1, 80))
def test_the_smallest_streamed_chunk_is_streamed_and_half_of_it_is_not(
    link: LinkRates, block_bytes: int, num_layers: int
) -> None:
    smallest = link.min_streaming_blocks(block_bytes, num_layers)
    if smallest is None:
        for num_blocks in (1, 1 << 10, 1 << 16):
            assert link.num_groups(num_blocks, block_bytes, num_layers) == 1
        return
    assert link.num_groups(smallest, block_bytes, num_layers) > 1
    assert smallest == 1 or link.num_groups(smallest // 2, block_bytes, num_layers) == 1
