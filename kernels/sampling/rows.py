"""The operands and results of sampling as tensors, for kernels and reference implementation."""

from dataclasses import dataclass

import torch

LEAST_TEMPERATURE = 1e-6  # below it a draw is greedy in float32, and logits would overflow
LARGEST_LOGIT = 3e38  # a best logit outside of (-3e38, 3e38) gives no token
NO_TOKEN = -1  # the token id of a row whose best logit is not finite, or that holds a NaN

_MASK = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) from a seed and a position.

    52 bits of SplitMix64 (Steele, Lea, Flood 2014) over seed, then position.
    """
    return (_mix(_mix(seed & _MASK) ^ position) >> 12) / 2**52


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(slots=True, frozen=True)
class SamplingRows:
    """The parameters of each row's draw: contiguous tensors on the device of the logits."""

    temperatures: torch.Tensor  # float32 [num_rows], 0 is greedy
    top_ks: torch.Tensor  # int [num_rows], off: 0, and the vocabulary's size or more
    top_ps: torch.Tensor  # float32 [num_rows], off: 1
    min_ps: torch.Tensor  # float32 [num_rows] at most 1, off: 0
    seeds: torch.Tensor  # int64 [num_rows], the bits of a u64
    positions: torch.Tensor  # int64 [num_rows], where in its sequence the token will stand


@dataclass(slots=True, frozen=True)
class TokenAdjustments:
    """Tokens whose logits change before a row is sampled, as one list of entries per row.

    Row r has the entries [starts[r], starts[r] + lengths[r]), each of another token of the
    vocabulary, in any order; a row may have none, and entries may belong to no row. An entry's
    logit is, in this order: divided by the repetition penalty if it is above 0 and multiplied by
    it otherwise, where `times` >= 0; lessened by times * frequency + presence penalty, where
    `times` > 0; increased by its bias; and -inf where it is held and position < held_until.
    """

    starts: torch.Tensor  # int64 [num_rows]
    lengths: torch.Tensor  # int [num_rows]
    token_ids: torch.Tensor  # int32 [num_entries]
    times: torch.Tensor  # int [num_entries] how often generated; -1: neither that nor in the prompt
    biases: torch.Tensor  # float32 [num_entries]
    held: torch.Tensor  # bool [num_entries]
    repetition_penalties: torch.Tensor  # float32 [num_rows], 1 is none
    frequency_penalties: torch.Tensor  # float32 [num_rows]
    presence_penalties: torch.Tensor  # float32 [num_rows]
    held_until: torch.Tensor  # int64 [num_rows], a position


@dataclass(slots=True, frozen=True)
class TokenMasks:
    """The tokens that some rows may draw: bit i % 32 of word i // 32 is set for token i."""

    rows: torch.Tensor  # int64 [num_masked], each once
    bits: torch.Tensor  # int32 [num_masked, ceil(vocab_size / 32)]


@dataclass(slots=True, frozen=True)
class SampledRows:
    """The results of sampling: contiguous tensors on the device of the logits."""

    token_ids: torch.Tensor  # int64 [num_rows], NO_TOKEN where there is none
    logprobs: torch.Tensor  # float32 [num_logprob_rows] of the row's token, by the raw logits
    top_ids: torch.Tensor  # int64 [num_logprob_rows, num_top] best first, of equals the lowest
    top_logprobs: torch.Tensor  # float32 [num_logprob_rows, num_top]


def new_sampled_rows(
    num_rows: int, num_logprob_rows: int, num_top: int, device: torch.device
) -> SampledRows:
    """Allocate the results of `num_rows` rows."""
    top = (num_logprob_rows, num_top)
    return SampledRows(
        torch.empty(num_rows, dtype=torch.int64, device=device),
        torch.empty(num_logprob_rows, dtype=torch.float32, device=device),
        torch.empty(top, dtype=torch.int64, device=device),
        torch.empty(top, dtype=torch.float32, device=device),
    )
