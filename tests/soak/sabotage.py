"""What is done to a decode worker from inside: bits flipped in landed KV, and events noted."""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch

from tandem.decode.metrics import DecodeMetrics
from tandem.decode.outcomes import HandoffOutcomes, RemotePrefill
from tandem.decode.remote import RemotePrefills
from tandem.runtime.messages import Claim
from tandem.transfer.handoff.actions import Action, Span, Verify
from tandem.transfer.handoff.decode import DecodeHandoff, HandoffState


class Notes:
    """A file of events that outlives its process, however that ends."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, event: str, **fields: object) -> None:
        line = json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n"
        os.write(self._file, line.encode())


def note_handoffs(notes: Notes) -> None:
    """Which request was claimed by whom, and how its handoff ended."""
    claim, admit, give_up = (
        RemotePrefills.claim,
        HandoffOutcomes.admit,
        HandoffOutcomes.prefill_locally,
    )

    def noted_claim(self: RemotePrefills, remote: RemotePrefill, asked: Claim, way: Any) -> bool:
        granted = claim(self, remote, asked, way)
        if granted:
            request_id = remote.active.request.request_id
            notes.add("claimed", request=request_id, prefill=asked.prefill_instance)
        return granted

    def noted_admit(self: HandoffOutcomes, remote: RemotePrefill, first: Any) -> None:
        notes.add("admitted", request=remote.active.request.request_id)
        admit(self, remote, first)

    def noted_give_up(
        self: HandoffOutcomes, remote: RemotePrefill, reason: str, *, quarantined: bool
    ) -> None:
        notes.add("local", request=remote.active.request.request_id, reason=reason)
        give_up(self, remote, reason, quarantined=quarantined)

    RemotePrefills.claim = noted_claim  # type: ignore[assignment, method-assign]
    HandoffOutcomes.admit = noted_admit  # type: ignore[method-assign]
    HandoffOutcomes.prefill_locally = noted_give_up  # type: ignore[method-assign]


def flip_bits(probability: float, seed: int, notes: Notes) -> None:
    """Before a landed span is verified, one bit of it is flipped with this probability.

    Each flip is noted, and what became of it: `caught` by the worker; `moot` when the handoff had
    ended before the answer, so that nobody reads the block; else `missed`. A mismatch that is none
    of ours is `corrupt`. `counted` is what the worker's own metric says.
    """
    verify, verified, mismatched = (
        RemotePrefills._verify,
        DecodeHandoff.verified,
        DecodeMetrics.mismatched,
    )
    draw = random.Random(seed)
    flipped: set[tuple[bytes, Span, int]] = set()

    async def verify_flipped(self: RemotePrefills, remote: RemotePrefill, work: Verify) -> None:
        machine = remote.machine
        if not machine.is_live or draw.random() >= probability:
            await verify(self, remote, work)
            return
        ordinal, block, _ = draw.choice(work.blocks)
        layers = work.span.layers
        flip = (machine.handoff_id, work.span, ordinal)
        flipped.add(flip)
        notes.add("flip")
        # [num_layers of the span, 2, num_kv_heads, block_size, head_dim]
        _flip_one(self._group.pool.tensor[block, layers.start : layers.stop], draw)
        await verify(self, remote, work)
        if flip in flipped:
            flipped.discard(flip)
            is_read = machine.is_live or machine.state is HandoffState.ADMITTED
            notes.add("missed" if is_read else "moot")

    def noted_verified(self: DecodeHandoff, span: Span, ordinal: int, ok: bool) -> list[Action]:
        flip = (self.handoff_id, span, ordinal)
        if self.is_live and not ok:
            notes.add("caught" if flip in flipped else "corrupt")
            flipped.discard(flip)
        return verified(self, span, ordinal, ok)

    def noted_mismatched(self: DecodeMetrics, prefill_instance: str) -> None:
        notes.add("counted")
        mismatched(self, prefill_instance)

    RemotePrefills._verify = verify_flipped  # type: ignore[assignment, method-assign]
    DecodeHandoff.verified = noted_verified  # type: ignore[method-assign]
    DecodeMetrics.mismatched = noted_mismatched  # type: ignore[method-assign]


def blind() -> None:
    """Takes the guard out: whatever was found, each block counts as proven."""
    verified = DecodeHandoff.verified

    def proven(self: DecodeHandoff, span: Span, ordinal: int, ok: bool) -> list[Action]:
        return verified(self, span, ordinal, True)

    DecodeHandoff.verified = proven  # type: ignore[method-assign]


def _flip_one(span: torch.Tensor, draw: random.Random) -> None:
    data = span.view(torch.uint8).view(-1)
    data[draw.randrange(data.numel())] ^= 1 << draw.randrange(8)
