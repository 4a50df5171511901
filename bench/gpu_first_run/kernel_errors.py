"""The error of every kernel against its reference implementation, over shapes of serving."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import msgspec
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tandem.bench.kernels.cases import ERROR_BOUNDS, Case, mismatch, relative_error
from tandem.bench.report.setting import Setting
from tandem.engine.architecture.rope import rope_table
from tandem.engine.architecture.rope_config import RopeConfig

EPS = 1e-6
LENGTHS = (1, 63, 64, 65, 1000, 8192)
TINY_LENGTHS = (1, 17, 33)
HEADS = ((32, 3), (64, 1), (96, 4), (128, 4), (128, 8), (256, 7))  # (head dim, group size)

Shape = tuple[torch.dtype, int, int, int]  # dtype, head dim, group size, block size
Errors = Iterator[tuple[str, float, float]]  # label, error, its bound


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """Some of a kernel's shapes; by default all."""

    is_tiny: bool = False
    head: int | None = None  # index in HEADS
    is_usual: bool | None = None  # bfloat16 and blocks of 64 tokens; False: all others


Kernel = Callable[[Setting, Part], Errors]


# ---- attention --------------------------------------------------------------------------------


def _shapes(setting: Setting, part: Part) -> Iterator[Shape]:
    if setting.is_dry or part.is_tiny:
        yield setting.dtype, 32, 3, 64
        return
    heads = HEADS if part.head is None else HEADS[part.head : part.head + 1]
    for dtype, block_size in product((torch.bfloat16, torch.float16), (64, 16, 128)):
        is_usual = (dtype, block_size) == (torch.bfloat16, 64)
        if part.is_usual is None or part.is_usual == is_usual:
            for head_dim, group in heads:
                yield dtype, head_dim, group, block_size


class _Pool:
    """Sequences over a pool in which every slot past a context holds NaN."""

    def __init__(self, shape: Shape, lengths: Sequence[int], device: torch.device) -> None:
        dtype, head_dim, _, block_size = shape
        counts = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(counts) + 1)
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
        self.clean = torch.zeros(len(order), 2, 2, block_size, head_dim)
        dead = torch.ones(len(order), 1, 1, block_size, 1, dtype=torch.bool)
        first = 0
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            blocks = order[first : first + count]
            first += count
            self.tables[row, :count] = blocks
            self.clean[blocks] = torch.randn(count, 2, 2, block_size, head_dim)
            for ordinal, block in enumerate(blocks.tolist()):
                dead[block, ..., : max(0, length - ordinal * block_size), :] = False
        self.clean = self.clean.to(device, dtype).masked_fill(dead.to(device), 0)
        self.kv = self.clean.masked_fill(dead.to(device), float("nan"))
        self.tables = self.tables.to(device)
        self.context_lens = torch.tensor(list(lengths), device=device)


def _prefill(setting: Setting, part: Part) -> Errors:
    from tandem.kernels.attention.prefill import default_config, prefill_attention
    from tandem.kernels.reference.prefill_attention import prefill_attention as reference

    for shape in _shapes(setting, part):
        dtype, head_dim, _, block_size = shape
        config = default_config(head_dim, dtype.itemsize, block_size)
        ours = partial(prefill_attention, config=replace(config, warp_specialized=False))
        yield from _prefill_errors(ours, reference, shape, setting, part)


def _prefill_hopper(setting: Setting, part: Part) -> Errors:
    from tandem.kernels.attention.prefill_hopper import offered, prefill_attention_hopper
    from tandem.kernels.reference.prefill_attention import prefill_attention as reference

    if setting.is_dry or torch.cuda.get_device_capability(setting.device)[0] != 9:
        yield "not on this chip", 0.0, 1.0
        return
    shapes = [(torch.bfloat16, 64, 4, 64)] if part.is_tiny else list(_shapes(setting, part))
    mine = [shape for shape in shapes if offered(shape[1], shape[3], shape[0])]
    if not mine:
        yield "not of these shapes", 0.0, 1.0
    for shape in mine:
        yield from _prefill_errors(prefill_attention_hopper, reference, shape, setting, part)


def _prefill_errors(
    ours: Callable[..., None],
    reference: Callable[..., None],
    shape: Shape,
    setting: Setting,
    part: Part,
) -> Errors:
    dtype, head_dim, group, _ = shape
    lengths = TINY_LENGTHS if setting.is_dry or part.is_tiny else LENGTHS[:5]
    pool = _Pool(shape, lengths, setting.device)
    # a whole prompt, the end of one, and so on in turns
    query_lens = [max(1, length - index % 2 * 7) for index, length in enumerate(lengths)]
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(setting.device)
    q = torch.randn(sum(query_lens), 2 * group, head_dim, device=setting.device).to(dtype)
    out, expected = torch.full_like(q, float("nan")), torch.empty_like(q)
    where = (pool.tables, starts, pool.context_lens, max(query_lens), head_dim**-0.5)
    ours(q, pool.kv, *where, out)
    # torch's other backends want masks at aligned addresses, and fault at parts of one
    with sdpa_kernel(SDPBackend.MATH):
        reference(q, pool.clean, *where, expected)
    yield f"{shape}", relative_error(out, expected), ERROR_BOUNDS[dtype]


def _decode(setting: Setting, part: Part) -> Errors:
    from tandem.kernels.attention.decode import paged_decode_attention, plan_prefixes
    from tandem.kernels.reference.paged_attention import paged_decode_attention as reference

    for shape in _shapes(setting, part):
        dtype, head_dim, group, _ = shape
        lengths = TINY_LENGTHS if setting.is_dry or part.is_tiny else LENGTHS
        pool = _Pool(shape, lengths, setting.device)
        q = torch.randn(len(lengths), 2 * group, head_dim, device=setting.device).to(dtype)
        out, expected = torch.full_like(q, float("nan")), torch.empty_like(q)
        where = (pool.tables, pool.context_lens, head_dim**-0.5)
        paged_decode_attention(q, pool.kv, *where, out)
        reference(q, pool.clean, *where, expected)
        yield f"{shape}", relative_error(out, expected), ERROR_BOUNDS[dtype]
        # The last sequence but one begins with the blocks of the last.
        count = lengths[-2] // shape[3]
        pool.tables[-2, :count] = pool.tables[-1, :count]
        prefixes = plan_prefixes(pool.kv, *where[:2], group)
        out.fill_(float("nan"))
        paged_decode_attention(q, pool.kv, *where, out, prefixes=prefixes)
        reference(q, pool.clean, *where, expected)
        yield f"{shape}, a shared prefix", relative_error(out, expected), ERROR_BOUNDS[dtype]


def _kv_store(setting: Setting, part: Part) -> Errors:
    from tandem.kernels.layers.kv_store import store_qkv
    from tandem.kernels.reference.kv_store import store_qkv as reference

    for dtype, head_dim, group, block_size in _shapes(setting, part):
        num_tokens, device = (9 if setting.is_dry or part.is_tiny else 777), setting.device
        qkv = torch.randn(num_tokens, 2 * group + 4, head_dim, device=device).to(dtype)
        norm = torch.rand(2 * group + 2, head_dim, device=device).to(dtype)
        rope = rope_table(RopeConfig(1e4), head_dim, num_tokens, dtype, device)
        positions = torch.randperm(num_tokens, device=device)
        num_blocks = num_tokens // block_size + 1
        slots = torch.randperm(num_blocks * block_size, device=device)[:num_tokens]
        slots[0] = -1
        found = []
        for store in (store_qkv, reference):
            pool = torch.zeros(num_blocks, 2, 2, block_size, head_dim, dtype=dtype, device=device)
            q_out = torch.zeros(num_tokens, 2 * group, head_dim, dtype=dtype, device=device)
            store(qkv.clone(), norm, rope, positions, slots, pool, EPS, q_out)
            found.append(torch.cat([pool.flatten(), q_out.flatten()]))
        label = f"{dtype} {head_dim} {group} {block_size}"
        yield label, relative_error(*found), ERROR_BOUNDS[dtype]


# ---- the rest ---------------------------------------------------------------------------------


def _layer(name: str) -> Kernel:
    """Return the errors that a case of the benchmark finds, for matrices of many sizes."""

    def errors(setting: Setting, part: Part) -> Errors:
        from tandem.bench.kernels import layers

        cases = getattr(layers, name)
        for dtype, num_tokens, size in _matrices(setting, part):
            (case,) = cases(replace(setting, dtype=dtype, rounds=0), num_tokens, size)
            yield f"{dtype} {num_tokens} x {size}", *_error_of(case)

    return errors


def _error_of(case: Case) -> tuple[float, float]:
    """Return the error of a case, and its bound."""
    return case.check(case.calls()[0]), case.error_bound


def _products(setting: Setting, part: Part) -> Errors:
    from tandem.kernels.linear.launch import multiply
    from tandem.kernels.reference.activation import silu_mul
    from tandem.kernels.reference.norm import rms_norm

    for dtype, num_tokens, size in _matrices(setting, part):
        if num_tokens > 1000:  # as many tiles of the same kind
            num_tokens = 130
        x, norm = (torch.randn(*each, size, device=setting.device) for each in ((num_tokens,), ()))
        weight = torch.randn(2 * size, size, device=setting.device) * size**-0.5
        x, norm, weight = (each.to(dtype) for each in (x, norm, weight))
        normed = torch.empty_like(x, dtype=torch.float32)
        rms_norm(x.float(), norm.float(), EPS, normed)
        expected = torch.empty_like(normed)
        silu_mul(normed @ weight.float().T, expected)
        opened = multiply(x, weight, norm=norm, eps=EPS, activation="silu")
        label = f"{dtype} {num_tokens} x {size}"
        yield f"norm, SiLU {label}", relative_error(opened, expected), ERROR_BOUNDS[dtype]
        total = x.clone()
        multiply(opened, weight[:size], residual=total)
        expected = x.float() + opened.float() @ weight[:size].float().T
        yield f"residual {label}", relative_error(total, expected), ERROR_BOUNDS[dtype]


def _float8(setting: Setting, part: Part) -> Errors:
    from tandem.bench.kernels.products import LEAST_FLOAT8_BOUND, exact_inputs, float8_matrix
    from tandem.kernels.linear.float8 import has_float8_products
    from tandem.kernels.linear.launch import multiply
    from tandem.kernels.reference.quantized import expanded, rounded_inputs

    if not has_float8_products():
        yield "not on this chip", 0.0, 1.0
        return
    for dtype, num_tokens, size in _matrices(setting, part):
        x = exact_inputs(setting, min(num_tokens, 300), size)
        if not setting.is_dry:
            x = torch.randn_like(x)
        x, weight = x.to(dtype), float8_matrix(setting, 2 * size, size)
        product, label = multiply(x, weight), f"{dtype} {len(x)} x {size}"
        expected = rounded_inputs(x) @ expanded(weight).T
        bound = max(LEAST_FLOAT8_BOUND, ERROR_BOUNDS[dtype])
        yield label, relative_error(product, expected), bound
        yield f"{label}, few of them", mismatch(multiply(x[:65], weight), product[:65]), 1e-9


def _matrices(setting: Setting, part: Part) -> Iterator[tuple[torch.dtype, int, int]]:
    if setting.is_dry or part.is_tiny:
        yield setting.dtype, 5, 96
        return
    yield from product(ERROR_BOUNDS, (1, 65, 4097), (96, 4096, 5120))


def _sampling(setting: Setting, part: Part) -> Errors:
    from tandem.bench.kernels.sampling import METHODS, sampling_case

    small = setting.is_dry or part.is_tiny
    for num_rows, size in ((1, 300),) if small else ((1, 512), (7, 32000), (128, 151936)):
        logits = 3 * torch.randn(1, num_rows, size, device=setting.device)
        for method in METHODS:
            case = sampling_case(method, logits, setting)
            yield f"{method.name} {num_rows} x {size}", *_error_of(case)


def _checksum(setting: Setting, part: Part) -> Errors:
    from tandem.kernels.checksum import block_checksums, part_table
    from tandem.transfer.mix64 import mix64

    num_words = 96 if setting.is_dry or part.is_tiny else 1 << 18
    shape = (40, num_words)
    words = torch.randint(-(2**31), 2**31, shape, device=setting.device).to(torch.int32)
    ids = torch.tensor([3, 0, 39, 17], device=setting.device)
    parts = ((0, num_words // 3), (num_words // 2, num_words // 4))
    sums = block_checksums(words, ids, part_table(parts, setting.device))
    yield "blocks", mismatch(sums, mix64(words, ids, parts)), 1e-9


KERNELS: dict[str, Kernel] = {
    "prefill": _prefill,
    "prefill_hopper": _prefill_hopper,
    "decode": _decode,
    "kv_store": _kv_store,
    "norm": _layer("add_rms_norm"),
    "activation": _layer("silu_mul"),
    "embedding": _layer("embed"),
    "products": _products,
    "float8": _float8,
    "sampling": _sampling,
    "checksum": _checksum,
}

BY_HEADS = ("prefill", "prefill_hopper", "decode", "kv_store")  # with a build for each head dim
