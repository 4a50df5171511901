"""Kernels that break a rule each. Run as a program, it builds them for sm_90 and prints facts."""

import sys
from functools import partial

import msgspec
import torch
import triton
import triton.language as tl

from tandem.bench.kernels.build_cases import BuildCase
from tandem.bench.kernels.builds import read_build
from tandem.bench.kernels.compile import compiling, meta
from tandem.kernels.dependent_launch import wait_for_predecessor


@triton.jit
def spilling(x, out, SIZE: tl.constexpr):
    values = tl.load(x + tl.arange(0, SIZE)).to(tl.float32)
    tl.store(out + tl.arange(0, SIZE), values - tl.sum(values))


@triton.jit
def narrow(x, out, SIZE: tl.constexpr):
    values = tl.load(x + tl.arange(0, SIZE) * 3)
    tl.store(out + tl.arange(0, SIZE), values)


@triton.jit
def partly_narrow(x, out, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    tl.store(out + lanes, tl.load(x + lanes) + tl.load(x + lanes * 3))


@triton.jit
def multiplying(x, out, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, DEPTH)[None, :]
    left = tl.load(x + rows * DEPTH + columns)
    right = tl.load(x + tl.arange(0, DEPTH)[:, None] * 256 + tl.arange(0, 256)[None, :])
    tl.store(out + rows * 256 + tl.arange(0, 256)[None, :], tl.dot(left, right))


@triton.jit
def hasty(x, out, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    tl.store(out + lanes, tl.load(x + lanes))
    wait_for_predecessor()


def main() -> None:
    x, out = meta(1 << 20, dtype=torch.bfloat16), meta(1 << 20, dtype=torch.bfloat16)
    cases = [
        BuildCase(
            "layers.norm", "spilling", partial(spilling[(1,)], x, out, SIZE=16384, num_warps=1)
        ),
        BuildCase("layers.norm", "narrow", partial(narrow[(1,)], x, out, SIZE=1024)),
        BuildCase("layers.norm", "partly narrow", partial(partly_narrow[(1,)], x, out, SIZE=1024)),
        BuildCase(
            "attention.prefill", "few rows", partial(multiplying[(1,)], x, out, ROWS=16, DEPTH=64)
        ),
        BuildCase(
            "attention.prefill", "in series", partial(multiplying[(1,)], x, out, ROWS=64, DEPTH=16)
        ),
        BuildCase(
            "attention.prefill",
            "large",
            partial(multiplying[(1,)], x, out, ROWS=128, DEPTH=512, num_warps=8),
        ),
    ]
    cases += [
        BuildCase("checksum", "hasty", partial(hasty[(1,)], x, out, SIZE=1024, launch_pdl=True))
    ]
    builds = []
    for case in cases:
        with compiling(90) as compiled:
            case.launch()
        builds.append(read_build(case, "", compiled[0]))
    sys.stdout.buffer.write(msgspec.json.encode(builds))


if __name__ == "__main__":
    main()
