"""Lanes: programs of all ranks of a model that exchange numbers over memory that all can reach.

A lane is a program, and exchanges with the same lane of the other ranks. It has two places in each
rank's memory, which it uses in turn, and counts its rounds. In a round it writes numbers to its own
rank's place, tells every rank so, waits until each has told it the same, and reads their places. A
place is written again two rounds later: by then every rank has arrived at the round between, and so
has read it. A launch needs nothing of the host, so that a CUDA graph can hold it.
"""

import triton
import triton.language as tl

NUM_LANES = 64  # fewer than multiprocessors: all of a launch run at one time
FLAG_BYTES = 128  # of a lane: an int32 of each rank, the round that it has come to
PLACE_NUMBERS = 2048  # float32
MEMORY_BYTES = NUM_LANES * (FLAG_BYTES + 2 * PLACE_NUMBERS * 4)  # of a rank

_FLAGS = tl.constexpr(FLAG_BYTES // 4)
_ALL_FLAGS = tl.constexpr(NUM_LANES * FLAG_BYTES // 4)
_PLACE = tl.constexpr(PLACE_NUMBERS)


@triton.jit
def place_of(memories, rank, my_lane, my_round):  # type: ignore[no-untyped-def]
    """Return the lane's place of a round in a rank's memory."""
    memory = tl.load(memories + rank).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(memory, 16) + _ALL_FLAGS + (my_lane * 2 + (my_round & 1)) * _PLACE


@triton.jit
def load_from(memories, rank, my_lane, my_round, columns):  # type: ignore[no-untyped-def]
    """Load numbers of a rank's place, after `meet`."""
    # Not by a multiprocessor's own cache, which may have what was there two rounds ago.
    return tl.load(place_of(memories, rank, my_lane, my_round) + columns, cache_modifier=".cg")


@triton.jit  # type: ignore[untyped-decorator]
def meet(  # type: ignore[no-untyped-def]
    memories,  # [NUM_RANKS], addresses
    my_lane,
    my_round,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
):
    """Wait until this lane of every rank has come to `my_round`, counted modulo 2**32."""
    ranks = tl.arange(0, NUM_RANKS)
    all_flags = tl.load(memories + ranks).to(tl.pointer_type(tl.int32)) + my_lane * _FLAGS
    my_flags = tl.load(memories + RANK).to(tl.pointer_type(tl.int32)) + my_lane * _FLAGS + ranks
    tl.debug_barrier()  # all threads have read the last round's numbers and written this one's
    tl.atomic_xchg(all_flags + RANK, my_round, sem="release", scope="sys")
    # A number goes through the loop: with a tensor there, Triton 3.7 fails to compile it.
    lead = tl.min(tl.atomic_add(my_flags, 0, sem="acquire", scope="sys") - my_round, 0)
    while lead < 0:
        lead = tl.min(tl.atomic_add(my_flags, 0, sem="acquire", scope="sys") - my_round, 0)
    tl.debug_barrier()  # no thread reads this round's numbers before
