"""The kernels compile for a Hopper GPU, which needs none."""

import subprocess
import sys

import pytest

PROGRAM = """
import importlib, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

module, name, pointers, constants = sys.argv[1:]
kernel = getattr(importlib.import_module(f"tandem.kernels.{module}"), name)
constants = {k: int(v) for k, v in (pair.split("=") for pair in constants.split(","))}
pointers = dict(pair.split("=") for pair in pointers.split(","))
signature = {
    name: "constexpr" if name in constants
    else "*" + pointers[name] if name in pointers
    else "fp32" if name == "scale"
    else "i32"
    for name in kernel.arg_names
}
source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
assert compiled.metadata.shared <= 227 * 1024, compiled.metadata.shared
assert ".target sm_90" in compiled.asm["ptx"]
"""

SHAPE = "block_size=16,head_dim=128"
POINTERS = "q=bf16,kv_cache=bf16,out=bf16,block_tables=i64,context_lens=i64"


@pytest.mark.parametrize(
    ("module", "name", "pointers", "constants"),
    [
        (
            "kv_store",
            "_store_kv_kernel",
            "kv=bf16,kv_cache=bf16,slot_mapping=i64",
            f"{SHAPE},num_kv_heads=8,BLOCK_H=8,BLOCK_D=128",
        ),
        (
            "paged_attention",
            "_paged_decode_kernel",
            POINTERS,
            f"{SHAPE},group_size=4,BLOCK_G=16,BLOCK_N=64,BLOCK_D=128",
        ),
        (
            "prefill_attention",
            "_prefill_kernel",
            f"{POINTERS},cu_seqlens_q=i64",
            f"{SHAPE},group_size=4,BLOCK_M=64,BLOCK_N=64,BLOCK_D=128",
        ),
    ],
)
def test_the_kernel_compiles_for_hopper(
    compile_environment: dict[str, str], module: str, name: str, pointers: str, constants: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, name, pointers, constants],
        env=compile_environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
