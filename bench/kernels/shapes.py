"""The shapes whose configurations `tune_kernels` chooses: those of common models."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

from tandem.bench.kernels import decode as kernel_decode
from tandem.bench.kernels import layers as kernel_layers
from tandem.bench.kernels import prefill as kernel_prefill
from tandem.bench.kernels import products as kernel_products
from tandem.bench.kernels import sampling as kernel_sampling
from tandem.bench.kernels.cases import Case
from tandem.bench.kernels.pool import Pool
from tandem.bench.report.setting import Setting
from tandem.kernels import checksum
from tandem.kernels.attention import decode as paged_attention
from tandem.kernels.attention import prefill as prefill_attention
from tandem.kernels.layers import activation, embedding, kv_store, norm
from tandem.kernels.linear import launch as linear
from tandem.kernels.sampling import launch as sampling
from tandem.kernels.tuned import architecture

GROUP_SIZE = 4
HEAD_SHAPES = ((128, 64), (128, 128), (128, 16), (64, 64), (96, 64), (256, 64))  # and block size
HIDDEN_SIZES = (1024, 2048, 2560, 4096, 5120)
INTERMEDIATE_SIZES = (3072, 6144, 9728, 12288, 14336, 17408)
HOPPER_SHAPES = ((128, 64), (128, 128), (128, 16), (64, 64))
LINEAR_SHAPES = ((4096, 4096, False), (4096, 12288, False), (24576, 4096, True))
VOCAB_SIZES = (151936, 128256, 32000)
TOKEN_COUNTS = (8192, 32)  # of a prefill step, of a decode step


@dataclass(frozen=True, slots=True)
class Tunable:
    """A kernel at one shape: its family's module, and how to make the case to measure."""

    module: ModuleType
    label: str
    make: Callable[[], Case]
    variants: Callable[[Any], Iterable[Any]] | None = None  # of the current one; else candidates


Cases = Callable[..., Sequence[Case]]


def _prefill(setting: Setting) -> Iterator[Tunable]:
    for head_dim, block_size in HEAD_SHAPES:
        label = f"prefill 16k, head_dim {head_dim}, block {block_size}"
        make = partial(_prefill_case, setting, label, head_dim, block_size)
        yield Tunable(prefill_attention, label, make)


def _prefill_case(
    setting: Setting,
    label: str,
    head_dim: int,
    block_size: int,
    attention: kernel_prefill.Attention = prefill_attention.prefill_attention,
) -> Case:
    length = setting.size(16384, 40)
    return kernel_prefill.prefill_case(
        label,
        label,
        [(length, length)],
        block_size,
        setting,
        shuffled=True,
        head_dim=head_dim,
        attention=attention,
    )


def _decode(setting: Setting) -> Iterator[Tunable]:
    for head_dim, block_size in HEAD_SHAPES:
        label = f"decode B64 4k, head_dim {head_dim}, block {block_size}"
        make = partial(_decode_case, setting, label, head_dim, block_size)
        yield Tunable(paged_attention, label, make)


def _decode_case(setting: Setting, label: str, head_dim: int, block_size: int) -> Case:
    lens = (setting.size(4096, 40),) * setting.size(64, 2)
    kv_heads, head_dim = setting.size(8, 2), setting.size(head_dim, 16)
    pool = Pool(setting.size(64 * 4096, 512), 4, kv_heads, head_dim, setting)
    return kernel_decode.decode_case(kernel_decode.Shape(label, lens, block_size), pool, setting)


def _layers(
    module: ModuleType, cases: Cases, counts: Sequence[int], sizes: Sequence[int]
) -> Callable[[Setting], Iterator[Tunable]]:
    def tunables(setting: Setting) -> Iterator[Tunable]:
        for size in sizes:
            for count in counts:
                label = f"{cases.__name__}, {count} tokens, width {size}"
                yield Tunable(module, label, partial(_only, cases, setting, count, size))

    return tunables


def _only(cases: Cases, *arguments: Any) -> Case:
    return cases(*arguments)[0]


def _prefill_hopper(setting: Setting) -> Iterator[Tunable]:
    """Yield nothing but on the chip that the kernel is for."""
    if setting.is_dry or architecture() != 90:
        return
    # Imported here: where it isn't for this chip or this compiler, the others are tuned.
    from tandem.kernels.attention import prefill_hopper as prefill_attention_hopper

    attention = prefill_attention_hopper.prefill_attention_hopper
    for head_dim, block_size in HOPPER_SHAPES:
        label = f"prefill 16k (warp-specialized), head_dim {head_dim}, block {block_size}"
        make = partial(_prefill_case, setting, label, head_dim, block_size, attention)
        yield Tunable(prefill_attention_hopper, label, make)


def _warp_specialization(setting: Setting) -> Iterator[Tunable]:
    """Choose between prefill attention, tuned by now, and the kernel for this chip."""
    if setting.is_dry or architecture() != 90:
        return
    for head_dim, block_size in HOPPER_SHAPES:
        label = f"prefill 16k, warp-specialized or not, head_dim {head_dim}, block {block_size}"
        make = partial(_prefill_case, setting, label, head_dim, block_size)
        yield Tunable(prefill_attention, label, make, _with_and_without_warp_specialization)


def _with_and_without_warp_specialization(config: Any) -> Iterator[Any]:
    yield from (replace(config, warp_specialized=value) for value in (False, True))


def _sampling(setting: Setting) -> Iterator[Tunable]:
    for vocab_size in VOCAB_SIZES:
        label = f"sampling B128, vocabulary {vocab_size}"
        make = partial(kernel_sampling.top_k_top_p_case, setting, vocab_size)
        yield Tunable(sampling, label, make)


def _checksum(setting: Setting) -> Iterator[Tunable]:
    yield Tunable(checksum, "checksum", partial(_only, kernel_layers.checksum, setting))


def _linear(setting: Setting) -> Iterator[Tunable]:
    """Yield the products of a decode step of an 8-billion-parameter model, gates and ups as one."""
    for rows, columns, is_paired in LINEAR_SHAPES:
        size = setting.size(rows, 64), setting.size(columns, 64)
        label = f"product of 16 tokens, {rows} x {columns}"
        make = partial(
            kernel_products.product_case,
            setting,
            setting.size(16, 2),
            label,
            *size,
            is_paired=is_paired,
        )
        yield Tunable(linear, label, make)


FAMILIES: dict[str, Callable[[Setting], Iterator[Tunable]]] = {
    "prefill_attention": _prefill,
    "prefill_attention_hopper": _prefill_hopper,
    "warp_specialization": _warp_specialization,  # after the two that it chooses between
    "paged_attention": _decode,
    "linear": _linear,
    "sampling": _sampling,
    "store_qkv": _layers(kv_store, kernel_layers.store_qkv, TOKEN_COUNTS, (64, 128)),
    "rms_norm": _layers(norm, kernel_layers.add_rms_norm, TOKEN_COUNTS[:1], HIDDEN_SIZES),
    "silu_mul": _layers(activation, kernel_layers.silu_mul, TOKEN_COUNTS, INTERMEDIATE_SIZES),
    "embed": _layers(embedding, kernel_layers.embed, TOKEN_COUNTS, HIDDEN_SIZES),
    "checksum": _checksum,
}
