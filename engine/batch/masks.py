"""The masks of a step's rows: tokens that the grammars of their answers allow.

Masks are begun before a step's computation is launched, and waited for after it. A mask that is not
ready by its time holds no other row up: its row draws nothing in this step, and is computed again.
"""

import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from tandem.engine.schedule.matcher import Matcher, Words
from tandem.kernels.sampling.rows import TokenMasks
from tandem.runtime.errors import TandemError

if TYPE_CHECKING:
    from tandem.engine.schedule.sequence import Chunk, Sequence

WAIT_S = 1e-3  # of a step for its masks, after its computation was launched
ALONE_WAIT_S = 20e-3  # of a step that computes nothing else; commands wait meanwhile


@dataclass(slots=True)
class MaskedRows:
    """Rows of a step whose answers follow a grammar.

    `undrawn` is complete once `tensors` has returned: rows that draw no token, with their error,
    or with None where the mask is not ready.
    """

    rows: list[tuple[int, "Sequence"]]
    has_others: bool  # chunks that would wait too
    eos_token_ids: tuple[int, ...]
    undrawn: dict[int, TandemError | None] = field(default_factory=dict)

    def tensors(self, device: torch.device) -> TokenMasks | None:
        """Wait for the masks, and return those in time; None when there are none."""
        found: dict[int, Words] = {}
        deadline = time.perf_counter() + (WAIT_S if self.has_others else ALONE_WAIT_S)
        for row, seq in self.rows:
            assert seq.matcher is not None
            timeout_s = None  # the first token of a handoff is not put off: its K/V is being sent
            if not seq.prefill_only:
                timeout_s = max(0.0, deadline - time.perf_counter())
            if not seq.matcher.wait(timeout_s):
                self.undrawn[row] = None
                continue
            try:
                found[row] = self._mask(seq, seq.matcher)
            except TandemError as error:
                self.undrawn[row] = error
        if not found:
            return None
        # Each of these is some microseconds less than torch.tensor and np.stack.
        rows = torch.frombuffer(array("q", found), dtype=torch.int64)
        bits = torch.from_numpy(np.concatenate(list(found.values())).reshape(len(found), -1))
        if device.type == "cuda":
            rows = rows.pin_memory().to(device, non_blocking=True)
            bits = bits.pin_memory().to(device, non_blocking=True)
        return TokenMasks(rows, bits)

    def _mask(self, seq: "Sequence", matcher: Matcher) -> Words:
        """Return the mask without the tokens that are held back, unless no others are left."""
        mask = matcher.mask()
        if not seq.stop.ignore_eos and seq.num_generated_tokens >= seq.stop.min_tokens:
            return mask
        held = [token_id for token_id in _held(seq, self.eos_token_ids) if _allows(mask, token_id)]
        if not held:
            return mask
        rest = mask.copy()
        bits = rest.view(np.uint32)
        for token_id in held:
            bits[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return rest if rest.any() else mask


def begin_masks(
    sampled: "list[Chunk]", eos_token_ids: tuple[int, ...], num_chunks: int
) -> MaskedRows:
    """Begin to compute the masks of the next tokens of `sampled`."""
    rows = [(row, chunk.seq) for row, chunk in enumerate(sampled) if chunk.seq.matcher is not None]
    for _, seq in rows:
        matcher = seq.matcher
        assert matcher is not None
        matcher.begin(seq.token_ids[seq.num_prompt_tokens + matcher.num_tokens :])
    return MaskedRows(rows, num_chunks > 1, eos_token_ids)


def _held(seq: "Sequence", eos_token_ids: tuple[int, ...]) -> set[int]:
    """Return the tokens that end the text, where the request wants more of it."""
    held: Iterable[int] = eos_token_ids if seq.stop.ignore_eos else ()
    if seq.num_generated_tokens < seq.stop.min_tokens:
        held = [*eos_token_ids, *seq.stop.stop_token_ids]
    return set(held)


def _allows(mask: Words, token_id: int) -> bool:
    return bool(mask[token_id // 32] >> token_id % 32 & 1)
