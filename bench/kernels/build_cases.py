"""Every launch whose build serving can pick, as calls that need no memory and no GPU."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from tandem.bench.kernels.compile import meta
from tandem.bench.kernels.shapes import HEAD_SHAPES, HIDDEN_SIZES, INTERMEDIATE_SIZES
from tandem.kernels import checksum
from tandem.kernels.attention import decode as paged_attention
from tandem.kernels.attention import prefill as prefill_attention
from tandem.kernels.attention import prefill_hopper as prefill_attention_hopper
from tandem.kernels.attention.prefixes import LEVELS, SharedPrefixes
from tandem.kernels.dependent_launch import LEAST_ARCHITECTURE
from tandem.kernels.experts import launch as experts
from tandem.kernels.layers import activation, embedding, kv_store, norm
from tandem.kernels.linear import float8
from tandem.kernels.linear import launch as linear
from tandem.kernels.linear.codes import weight_bits
from tandem.kernels.ranks.exchange import DeviceExchange
from tandem.kernels.reference.experts import ExpertWeights
from tandem.kernels.reference.quantized import BITS, Code, Matrix, QuantizedMatrix
from tandem.kernels.reference.routing import Routing
from tandem.kernels.sampling import launch as sampling
from tandem.kernels.sampling import masks
from tandem.kernels.sampling.rows import (
    SamplingRows,
    TokenAdjustments,
    TokenMasks,
    new_sampled_rows,
)
from tandem.kernels.tuned import shape_key

DTYPE, META = torch.bfloat16, torch.device("meta")
KV_HEADS, MAX_LEN, VOCABULARY, EPS = 8, 40960, 151936, 1e-6
TOKENS = {"few": 64, "many": 8192}
NUM_DECODES = 64
AttentionShape = tuple[int, int, int]  # (head dim, block size, query heads per KV head)
ATTENTION_SHAPES = tuple((*shape, 4) for shape in HEAD_SHAPES)
# (experts, of them chosen, hidden size, width of an expert, with biases and clamped)
EXPERT_SHAPES = ((128, 8, 2048, 768, False), (8, 2, 4096, 14336, False), (32, 4, 2880, 2880, True))
# (code, inputs that share a scale, with zeros): FP8 by blocks and by row, GPTQ and AWQ
QUANTIZED: tuple[tuple[Code, int, bool], ...] = (
    ("float8", 128, False),
    ("float8", 4096, False),
    ("int4", 128, False),
    ("int4", 128, True),
)
# Other options that change an attention's build, tried on one chip: the code is the same on all.
OTHER_GROUPS = ((128, 64, 1), (128, 64, 8), (32, 64, 3))  # the last is the bundled model's
OTHERS_ARCH = 90
FLOAT32 = "float32"  # of a shape; all others are in bfloat16


@dataclass(frozen=True, slots=True)
class BuildCase:
    """One call of a launcher; `family` names the file in kernels/."""

    family: str
    shape: str
    launch: Callable[[], object]
    config: str = ""  # of a launch that is not left to the table alone


def build_cases(arch: int) -> Iterator[BuildCase]:
    """Yield the launches of serving on `arch`; call each inside `compiling(arch)`."""
    yield from _prefill_cases(arch)
    yield from _decode_cases(arch)
    yield from _layer_cases()
    yield from _expert_cases()
    yield from _linear_cases()
    if arch >= float8.LEAST_ARCHITECTURE:
        yield from _float8_cases()
    if arch >= LEAST_ARCHITECTURE:
        yield from _fused_cases()
    yield from _transfer_cases()
    yield from _rank_cases()
    yield from _sampling_cases()


def _prefill_cases(arch: int) -> Iterator[BuildCase]:
    def launch(shape: AttentionShape, dtype: torch.dtype = DTYPE, **options: Any) -> None:
        inputs = _prefill_inputs(shape, dtype)
        chosen = options.pop("config", None) or prefill_attention.config_for(inputs[1])
        config = replace(chosen, warp_specialized=False)  # that kernel has cases of its own
        prefill_attention.prefill_attention(*inputs, config=config, **options)

    def launch_hopper(shape: AttentionShape) -> None:
        prefill_attention_hopper.prefill_attention_hopper(*_prefill_inputs(shape, DTYPE))

    yield from _attention_cases(arch, "attention.prefill", launch)
    if arch >= prefill_attention.FIRST_TMA_ARCH:
        config = prefill_attention.BLOCKS_OF_64
        text = shape_key(**asdict(config))
        for shape in ((128, 64, 4), (64, 64, 4), (96, 64, 4)):
            call = partial(launch, shape, config=config)
            yield BuildCase("attention.prefill", _attention_shape(shape), call, text)
    if arch == 90:
        for shape in ATTENTION_SHAPES:
            if prefill_attention_hopper.offered(shape[0], shape[1], DTYPE):
                call = partial(launch_hopper, shape)
                yield BuildCase("attention.prefill_hopper", _attention_shape(shape), call)


def _decode_cases(arch: int) -> Iterator[BuildCase]:
    def launch(shape: AttentionShape, dtype: torch.dtype = DTYPE, **options: Any) -> None:
        (head_dim, block_size, group_size), num_seqs = shape, NUM_DECODES
        q = meta(num_seqs, KV_HEADS * group_size, head_dim, dtype=dtype)
        paged_attention.paged_decode_attention(
            q,
            _layer(head_dim, block_size, dtype),
            _integers(num_seqs, MAX_LEN // block_size),
            _integers(num_seqs),
            head_dim**-0.5,
            torch.empty_like(q),
            **options,
        )

    yield from _attention_cases(arch, "attention.decode", launch)
    prefixes = SharedPrefixes(*(_integers(LEVELS, NUM_DECODES) for _ in range(3)))
    for shape in (*ATTENTION_SHAPES, *(OTHER_GROUPS if arch == OTHERS_ARCH else ())):
        call = partial(launch, shape, prefixes=prefixes)
        yield BuildCase("attention.decode", f"{_attention_shape(shape)} prefixes", call)


def _attention_cases(arch: int, family: str, launch: Callable[..., None]) -> Iterator[BuildCase]:
    for shape in ATTENTION_SHAPES:
        yield BuildCase(family, _attention_shape(shape), partial(launch, shape))
    if arch != OTHERS_ARCH:
        return
    for shape in OTHER_GROUPS:
        yield BuildCase(family, _attention_shape(shape), partial(launch, shape))
    for shape in ((32, 64, 3), (64, 64, 4)):
        call = partial(launch, shape, dtype=torch.float32)
        yield BuildCase(family, f"{_attention_shape(shape)} {FLOAT32}", call)
    capped, sinking = (256, 64, 4), (64, 64, 8)
    call = partial(launch, capped, soft_cap=50.0, window=4096)
    yield BuildCase(family, f"{_attention_shape(capped)} soft_cap=50 window=4096", call)
    sinks = meta(KV_HEADS * 8, dtype=torch.float32)
    call = partial(launch, sinking, sinks=sinks, window=128)
    yield BuildCase(family, f"{_attention_shape(sinking)} sinks window=128", call)


def _layer_cases() -> Iterator[BuildCase]:
    for head_dim in (64, 96, 128, 256):
        call = partial(_store_qkv, TOKENS["many"], head_dim, True)
        yield BuildCase("layers.kv_store", f"head_dim={head_dim} many tokens, QK-norm", call)
    for tokens, num_tokens in TOKENS.items():
        call = partial(_store_qkv, num_tokens, 128, tokens == "few")
        norms = ", QK-norm" if tokens == "few" else ""
        yield BuildCase("layers.kv_store", f"head_dim=128 {tokens} tokens{norms}", call)
        for size in HIDDEN_SIZES:
            x, table = meta(num_tokens, size, dtype=DTYPE), meta(VOCABULARY, size, dtype=DTYPE)
            call = partial(embedding.embed, _integers(num_tokens), table, x)
            yield BuildCase("layers.embedding", f"hidden_size={size} {tokens} tokens", call)
        for size in INTERMEDIATE_SIZES:
            gate_up, out = (meta(num_tokens, n * size, dtype=DTYPE) for n in (2, 1))
            call = partial(activation.silu_mul, gate_up, out)
            yield BuildCase("layers.activation", f"intermediate_size={size} {tokens} tokens", call)
    gate_up, out = (meta(TOKENS["many"], n * 14_336, dtype=DTYPE) for n in (2, 1))
    call = partial(activation.gelu_mul, gate_up, out)
    yield BuildCase("layers.activation", "intermediate_size=14336 many tokens, GELU", call)
    for size in HIDDEN_SIZES:
        x, residual = (meta(TOKENS["many"], size, dtype=DTYPE) for _ in range(2))
        weight = meta(size, dtype=DTYPE)
        call = partial(norm.rms_norm, x, weight, EPS, x)
        yield BuildCase("layers.norm", f"hidden_size={size}", call)
        call = partial(norm.add_rms_norm, x, residual, weight, EPS, x)
        yield BuildCase("layers.norm", f"hidden_size={size}, residual", call)


def _expert_cases() -> Iterator[BuildCase]:
    for sizes in EXPERT_SHAPES:
        case = _experts_case(sizes)
        yield case
        yield _experts_case(sizes, tokens="many")
        yield _route_case(case.shape, sizes[0], None, Routing(sizes[1]))
    correction = meta(256, dtype=torch.float32)
    routing = Routing(8, is_sigmoid=True, num_groups=8, num_open_groups=4)
    yield _route_case("experts=256 in 8 groups, corrected", 256, correction, routing)


def _linear_cases() -> Iterator[BuildCase]:
    out_size, in_size = 6144, 4096
    for dtype, name in ((DTYPE, ""), (torch.float32, f" {FLOAT32}")):
        weight = meta(out_size, in_size, dtype=dtype)
        yield from _in_order(weight, f"{out_size} x {in_size}, deterministic{name}")
    for code, group_size, has_zeros in QUANTIZED:
        codes = _quantized(code, group_size, has_zeros, out_size, in_size)
        groups = f"groups of {group_size}{', zeros' if has_zeros else ''}"
        yield from _in_order(codes, f"{code} {out_size} x {in_size}, {groups}")
    # Those of Qwen3-30B-A3B-FP8, then of gpt-oss.
    for tokens in TOKENS:
        yield _experts_case(EXPERT_SHAPES[0], "float8", 128, tokens)
        yield _experts_case(EXPERT_SHAPES[-1], "float4", 32, tokens)


def _in_order(weight: Matrix, shape: str) -> Iterator[BuildCase]:
    """Yield the products of a matrix by few tokens and by many."""
    in_size = weight.shape[1]
    dtype = weight.dtype if isinstance(weight, torch.Tensor) else DTYPE
    for tokens, num_tokens in TOKENS.items():
        if tokens == "many" and dtype == torch.float32:
            continue  # in the same tiles
        call = partial(linear.pack_linear_in_order(weight), meta(num_tokens, in_size, dtype=dtype))
        config = _large_config(weight) if tokens == "many" else ""
        yield BuildCase("linear.launch", f"{tokens} tokens, {shape}", call, config)
    if isinstance(weight, QuantizedMatrix):
        x = meta(TOKENS["many"], in_size, dtype=dtype)
        call = partial(linear.pack_linear(weight), x)
        yield BuildCase("linear.launch", f"{shape}, expanded", call)


def _large_config(weight: Matrix, *, is_paired: bool = False) -> str:
    num_rows, in_size = weight.shape
    has_codes = not isinstance(weight, torch.Tensor)
    default = linear.default_config(
        in_size, num_rows // (1 + is_paired), weight_bits(weight), DTYPE.itemsize, is_paired
    )
    return shape_key(**asdict(linear.large_config(default, has_codes=has_codes)))


def _float8_cases() -> Iterator[BuildCase]:
    """Yield products that round their inputs: with a norm, in splits or whole, by block or row."""
    hidden_size, width = 4096, 12288

    def case(
        tokens: str, rows: int, in_size: int, group_size: int, parts: str = "", **options: Any
    ) -> BuildCase:
        weight = _quantized("float8", group_size, False, rows, in_size)
        x = meta(TOKENS[tokens], in_size, dtype=DTYPE)
        call = partial(linear.multiply, x, replace(weight, rounds_inputs=True), **options)
        default = linear.default_config(in_size, rows // (1 + bool(parts)), 8, 2, bool(parts))
        config = linear.float8_config(default, is_large=tokens == "many" and not parts)
        shape = f"float8 by float8 {rows} x {in_size}, groups of {group_size}, {tokens} tokens"
        return BuildCase("linear.launch", shape + parts, call, shape_key(**asdict(config)))

    for tokens in TOKENS:
        yield case(tokens, 2 * width, hidden_size, 128)
        yield case(tokens, hidden_size, width, 128)
        yield case(tokens, hidden_size, width, width)
        norm = meta(hidden_size, dtype=DTYPE)
        options = {"norm": norm, "eps": EPS, "activation": "silu"}
        yield case(tokens, 2 * width, hidden_size, 128, ", norm, SiLU", **options)


def _experts_case(
    sizes: tuple[int, int, int, int, bool],
    code: Code | None = None,
    group_size: int = 0,
    tokens: str = "few",
) -> BuildCase:
    """Return the case of one of EXPERT_SHAPES; of weights as numbers without a `code`."""
    num_experts, num_chosen, hidden_size, width, is_clamped = sizes
    gate_up, down = (
        _quantized(code, group_size, False, *shape) if code else meta(*shape, dtype=DTYPE)
        for shape in ((num_experts, 2 * width, hidden_size), (num_experts, hidden_size, width))
    )
    gate_up_bias, down_bias = (
        meta(num_experts, size, dtype=DTYPE) if is_clamped else None
        for size in (2 * width, hidden_size)
    )
    weights = ExpertWeights(gate_up, down, gate_up_bias, down_bias, limit=7.0 * is_clamped)
    x = meta(TOKENS[tokens], hidden_size, dtype=DTYPE)
    chosen = _chosen(TOKENS[tokens], num_chosen)
    shape = f"experts={num_experts} hidden_size={hidden_size} width={width}"
    config = ""
    if tokens == "many":
        shape += ", many tokens"
        default = experts.default_config(DTYPE.itemsize, has_codes=code is not None)
        large = partial(experts.large_config, default, has_codes=code is not None)
        config = shape_key(**asdict(large(is_paired=True)))
        config += f", down: block_n={large(is_paired=False).block_n}"
    compute = partial(experts.pack_experts(weights), x, *chosen)
    return BuildCase("experts.launch", f"{shape} {code}" if code else shape, compute, config)


def _fused_cases() -> Iterator[BuildCase]:
    """Yield the products of a layer; queries and keys are normed, or have a bias instead."""
    hidden_size, width, head_dim = 4096, 12288, 128
    norm, rows = meta(hidden_size, dtype=DTYPE), 48 * head_dim
    table = meta(MAX_LEN, 2, head_dim, dtype=DTYPE)
    for tokens, num_tokens in TOKENS.items():
        x, opened = (meta(num_tokens, size, dtype=DTYPE) for size in (hidden_size, width))
        for form in ("", "float8 "):
            gate_up, down, qkv = (
                _quantized("float8", 128, False, *shape) if form else meta(*shape, dtype=DTYPE)
                for shape in ((2 * width, hidden_size), (hidden_size, width), (rows, hidden_size))
            )
            for has_norm in (True, False):
                call = partial(
                    linear.multiply_qkv,
                    x,
                    qkv,
                    meta(40, head_dim, dtype=DTYPE) if has_norm else None,
                    table,
                    _integers(num_tokens),
                    _integers(num_tokens),
                    _layer(head_dim, 64),
                    EPS,
                    norm=norm,
                    bias=None if has_norm else meta(rows, dtype=DTYPE),
                )
                part = "QK-norm" if has_norm else "bias"
                shape = f"{form}qkv {rows} x {hidden_size}, {tokens} tokens, {part}"
                yield BuildCase("linear.launch", shape, call)
            call = partial(linear.multiply, x, gate_up, norm=norm, eps=EPS, activation="silu")
            shape = f"{form}{2 * width} x {hidden_size}, {tokens} tokens, norm, SiLU"
            config = _large_config(gate_up, is_paired=True) if tokens == "many" else ""
            yield BuildCase("linear.launch", shape, call, config)
            call = partial(linear.multiply, opened, down, residual=x)
            shape = f"{form}{hidden_size} x {width}, {tokens} tokens, residual"
            config = _large_config(down) if tokens == "many" else ""
            yield BuildCase("linear.launch", shape, call, config)


def _quantized(code: Code, group_size: int, has_zeros: bool, *shape: int) -> QuantizedMatrix:
    *rows, in_size = shape
    codes = meta(*rows, in_size * BITS[code] // 8, dtype=torch.uint8)
    scales, zeros = (meta(*rows, in_size // group_size, dtype=DTYPE) for _ in range(2))
    return QuantizedMatrix(code, codes, scales, group_size, zeros if has_zeros else None)


def _route_case(
    shape: str, num_experts: int, correction: torch.Tensor | None, routing: Routing
) -> BuildCase:
    logits = meta(TOKENS["few"], num_experts, dtype=DTYPE)
    chosen = _chosen(len(logits), routing.num_chosen)
    call = partial(experts.route, logits, correction, routing, *chosen)
    return BuildCase("experts.launch", shape, call)


def _chosen(num_tokens: int, num_chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = num_tokens, num_chosen
    return meta(*shape, dtype=torch.int32), meta(*shape, dtype=torch.float32)


def _transfer_cases() -> Iterator[BuildCase]:
    words = meta(4096, _pool(128, 64)[0].numel() // 2, dtype=torch.int32)
    parts, ids = meta(40, 3, dtype=torch.int32), _integers(64)
    call = partial(checksum.block_checksums, words, ids, parts)
    yield BuildCase("checksum", "any block", call)


class _NoMemory(NamedTuple):
    rank: int
    world_size: int
    buffer_ptrs: list[int]


def _rank_cases() -> Iterator[BuildCase]:
    hidden_size = 4096
    for num_ranks in (2, 4, 8):
        exchange = DeviceExchange(_NoMemory(0, num_ranks, [0] * num_ranks), META)
        starts = [VOCABULARY * rank // num_ranks for rank in range(num_ranks + 1)]
        for tokens in TOKENS:
            part = meta(8 if tokens == "few" else TOKENS[tokens], hidden_size, dtype=torch.float32)
            call = partial(exchange.add_up, part, DTYPE)
            yield BuildCase("ranks.exchange", f"{num_ranks} ranks, {tokens} tokens", call)
        logits = meta(TOKENS["few"], starts[1], dtype=DTYPE)
        call = partial(exchange.join_columns, logits, starts)
        yield BuildCase("ranks.exchange", f"{num_ranks} ranks", call)


def _sampling_cases() -> Iterator[BuildCase]:
    num_rows, num_entries, num_top = 128, 4096, 20
    rows, out = _sampling_rows(num_rows), new_sampled_rows(num_rows, 0, 0, META)
    ranked = new_sampled_rows(num_rows, num_rows, num_top, META)
    logits = meta(num_rows, VOCABULARY, dtype=DTYPE)
    shape = f"vocab_size={VOCABULARY}"
    yield BuildCase("sampling.launch", shape, partial(sampling.sample, logits, rows, out))
    call = partial(
        sampling.sample,
        logits,
        rows,
        ranked,
        adjustments=_adjustments(num_rows, num_entries),
        logprob_rows=_integers(num_rows),
    )
    yield BuildCase("sampling.launch", f"{shape}, penalties, logprobs", call)
    bits = meta(num_rows, -(-VOCABULARY // 32), dtype=torch.int32)
    call = partial(masks.mask_logits, logits, TokenMasks(_integers(num_rows), bits))
    yield BuildCase("sampling.launch", f"{shape}, masks", call)


def _sampling_rows(num_rows: int) -> SamplingRows:
    floats, integers = meta(num_rows, dtype=torch.float32), _integers(num_rows)
    return SamplingRows(floats, integers, floats, floats, integers, integers)


def _adjustments(num_rows: int, num_entries: int) -> TokenAdjustments:
    floats, integers, entries = (
        meta(num_rows, dtype=torch.float32),
        _integers(num_rows),
        meta(num_entries, dtype=torch.int32),
    )
    return TokenAdjustments(
        starts=integers,
        lengths=integers,
        token_ids=entries,
        times=entries,
        biases=meta(num_entries, dtype=torch.float32),
        held=meta(num_entries, dtype=torch.bool),
        repetition_penalties=floats,
        frequency_penalties=floats,
        presence_penalties=floats,
        held_until=integers,
    )


def _store_qkv(num_tokens: int, head_dim: int, has_norm: bool) -> None:
    num_heads = 4 * KV_HEADS
    kv_store.store_qkv(
        meta(num_tokens, num_heads + 2 * KV_HEADS, head_dim, dtype=DTYPE),
        meta(num_heads + KV_HEADS, head_dim, dtype=DTYPE) if has_norm else None,
        meta(MAX_LEN, 2, head_dim, dtype=DTYPE),
        _integers(num_tokens),
        _integers(num_tokens),
        _layer(head_dim, 64),
        EPS,
        meta(num_tokens, num_heads, head_dim, dtype=DTYPE),
    )


def _prefill_inputs(shape: AttentionShape, dtype: torch.dtype) -> tuple[Any, ...]:
    (head_dim, block_size, group_size), num_seqs, longest = shape, 4, 4096
    q = meta(8192, KV_HEADS * group_size, head_dim, dtype=dtype)
    tables, starts = _integers(num_seqs, MAX_LEN // block_size), _integers(num_seqs + 1)
    lens, out = _integers(num_seqs), torch.empty_like(q)
    cache = _layer(head_dim, block_size, dtype)
    return q, cache, tables, starts, lens, longest, head_dim**-0.5, out


def _attention_shape(shape: AttentionShape) -> str:
    return "head_dim={} block_size={} group_size={}".format(*shape)


def _integers(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int64)


def _pool(head_dim: int, block_size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return meta(4096, 36, 2, KV_HEADS, block_size, head_dim, dtype=dtype)


def _layer(head_dim: int, block_size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return _pool(head_dim, block_size, dtype)[:, 3]
