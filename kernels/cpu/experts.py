"""Mixtures of experts in C, and the layout of their weights."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from tandem.kernels.cpu.launch import DTYPES, FLOAT, INT, LONG, PANEL, POINTER, fields, function
from tandem.kernels.cpu.linear import is_for_c, pack_panels
from tandem.kernels.cpu.quantized import Panels, pack_stacked
from tandem.kernels.cpu.segments import SegmentsStruct, segments_struct
from tandem.kernels.reference import experts as reference
from tandem.kernels.reference.experts import Experts, ExpertWeights
from tandem.kernels.reference.quantized import QuantizedMatrix
from tandem.kernels.reference.routing import Routing
from tandem.kernels.reference.segments import Segments

HALF = PANEL // 2  # gates in a panel, and rows of up beside them
MOST_TOKENS = 512  # in one call of C, whose buffers grow with them


class _Routing(ctypes.Structure):
    """struct routing"""

    _fields_ = fields(
        (LONG, "num_chosen num_groups num_open_groups"),
        (FLOAT, "scale"),
        (INT, "is_sigmoid is_renormalized"),
    )


class _Experts(ctypes.Structure):
    """struct experts"""

    _fields_ = fields(
        (POINTER, "x gate_up down gate_up_bias down_bias weights expert_ids"),
        (POINTER, "gathered opened out results"),
        (LONG, "num_tokens num_chosen num_experts hidden_size width x_stride"),
        (FLOAT, "alpha limit"),
        (INT, "dtype"),
        (POINTER, "quantized_gate_up quantized_down"),
        (SegmentsStruct, "cut"),
    )


_route = function("route", *[POINTER] * 5, *[LONG] * 3, INT)
_experts = function("experts", POINTER, INT)
_sum_choices = function("sum_choices", POINTER, INT)

AddUp = Callable[[torch.Tensor], torch.Tensor]  # float32 parts |-> the sums of all ranks' parts


def route(
    logits: torch.Tensor,  # [num_tokens, num_experts]
    correction: torch.Tensor | None,  # [num_experts] float32, added to sigmoids for the choice
    routing: Routing,
    expert_ids: torch.Tensor,  # [num_tokens, num_chosen] int32
    weights: torch.Tensor,  # [num_tokens, num_chosen] float32
) -> None:
    """Fill expert_ids, the best first, and weights; of equal scores the first expert's is best."""
    arguments = _Routing(
        routing.num_chosen,
        routing.num_groups,
        routing.num_open_groups,
        routing.scale,
        routing.is_sigmoid,
        routing.is_renormalized,
    )
    _route(
        ctypes.byref(arguments),
        logits.data_ptr(),
        None if correction is None else correction.data_ptr(),
        expert_ids.data_ptr(),
        weights.data_ptr(),
        *logits.shape,
        logits.stride(0),
        DTYPES[logits.dtype],
    )


def pack_experts(
    experts: ExpertWeights, segments: Segments | None = None, add_up: AddUp | None = None
) -> Experts:
    """Return the weighted sum of the chosen experts' results for x in activation_dtype().

    The function owns a copy of the weights. A panel of gate_up has a half of gates and the rows of
    up that belong to them. `experts` have these `segments` of each one's width, None: all of it in
    one; `add_up` joins them with those of other ranks, of experts that the kernels in C take.
    """
    gate_up, down = experts.gate_up, experts.down
    num_experts, hidden_size, width = down.shape
    segments = segments or Segments(width, 1, 0, 1, 1)
    assert len(segments.inputs) == width
    packed: tuple[torch.Tensor, torch.Tensor] | tuple[Panels, Panels]
    if isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        if not (is_for_c(gate_up[0]) and is_for_c(down[0])):
            assert add_up is None
            return reference.pack_experts(experts)
        packed = (
            torch.stack([pack_panels(_in_halves(each)) for each in gate_up.unbind()]),
            torch.stack([pack_panels(each) for each in down.unbind()]),
        )
    elif isinstance(gate_up, QuantizedMatrix) and isinstance(down, QuantizedMatrix):
        packed = pack_stacked(gate_up.each(_each_in_halves)), pack_stacked(down)
    else:
        assert add_up is None
        return reference.pack_experts(experts)
    stacked = _Stacked(
        packed[0],
        packed[1],
        None if experts.gate_up_bias is None else experts.gate_up_bias.float().contiguous(),
        None if experts.down_bias is None else experts.down_bias.float().contiguous(),
        num_experts,
        hidden_size,
        width,
        experts.alpha,
        experts.limit,
        segments_struct(segments),
        add_up,
    )
    return partial(_compute, experts=stacked)


@dataclass(frozen=True, slots=True)
class _Stacked:
    gate_up: torch.Tensor | Panels  # [num_experts, panels of hidden_size inputs]
    down: torch.Tensor | Panels  # [num_experts, panels of `width` inputs]
    gate_up_bias: torch.Tensor | None  # [num_experts, 2 * width] float32
    down_bias: torch.Tensor | None  # [num_experts, hidden_size] float32
    num_experts: int
    hidden_size: int
    width: int
    alpha: float
    limit: float
    cut: SegmentsStruct
    add_up: AddUp | None


def _in_halves(gate_up: torch.Tensor) -> torch.Tensor:
    """Return the rows of one expert in the order of panels; zeros fill the halves of the last."""
    gate, up = (F.pad(part, (0, 0, 0, -len(part) % HALF)) for part in gate_up.chunk(2))
    halves = torch.stack([gate.view(-1, HALF, gate.shape[1]), up.view(-1, HALF, up.shape[1])], 1)
    return halves.flatten(0, 2)


def _each_in_halves(gate_up: torch.Tensor) -> torch.Tensor:
    return torch.stack([_in_halves(each) for each in gate_up.unbind()])


def _compute(
    x: torch.Tensor,  # [num_tokens, hidden_size]
    expert_ids: torch.Tensor,  # [num_tokens, num_chosen] int32
    weights: torch.Tensor,  # [num_tokens, num_chosen] float32
    experts: _Stacked,
) -> torch.Tensor:
    if isinstance(experts.gate_up, Panels) and x.dtype != torch.float32:
        return _compute(x.float(), expert_ids, weights, experts).to(x.dtype)
    (num_tokens, hidden_size), num_chosen = x.shape, expert_ids.shape[1]
    panels, quantized = _pointers(experts)
    assert x.stride(1) == 1 and expert_ids.is_contiguous() and weights.is_contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    most = min(num_tokens, MOST_TOKENS) * num_chosen
    gathered, opened = x.new_empty(most, hidden_size), x.new_empty(most, experts.width)
    results = x.new_empty(most, hidden_size, dtype=torch.float32)
    for first in range(0, num_tokens, MOST_TOKENS):
        arguments = _Experts(
            x[first:].data_ptr(),
            *panels,
            None if experts.gate_up_bias is None else experts.gate_up_bias.data_ptr(),
            None if experts.down_bias is None else experts.down_bias.data_ptr(),
            weights[first:].data_ptr(),
            expert_ids[first:].data_ptr(),
            gathered.data_ptr(),
            opened.data_ptr(),
            out[first:].data_ptr(),
            results.data_ptr(),
            min(MOST_TOKENS, num_tokens - first),
            num_chosen,
            experts.num_experts,
            hidden_size,
            experts.width,
            x.stride(0),
            experts.alpha,
            experts.limit,
            DTYPES[x.dtype],
            *quantized,
            experts.cut,
        )
        _experts(ctypes.byref(arguments), torch.get_num_threads())
        if experts.add_up is not None:
            results = experts.add_up(results[: arguments.num_tokens * num_chosen])
            arguments.results = results.data_ptr()
        _sum_choices(ctypes.byref(arguments), torch.get_num_threads())
    return out


def _pointers(experts: _Stacked) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """Return those to panels of numbers, and those to panels of codes."""
    numbers, codes = [], []
    for part in (experts.gate_up, experts.down):
        numbers.append(part.data_ptr() if isinstance(part, torch.Tensor) else None)
        codes.append(part.pointer if isinstance(part, Panels) else None)
    return tuple(numbers), tuple(codes)
