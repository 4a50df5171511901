"""What is done to a decode worker from inside: bits flipped in landed KV, and events noted."""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch

from tandem.decode.handoffs import RemotePrefill
from tandem.decode.metrics import DecodeMetrics
from tandem.runtime.wire.handoff_messages import Claim
from tandem.transfer.handoff.actions import Action, Span, Verify
from tandem.transfer.handoff.causes import CloseCause
from tandem.transfer.handoff.decode import DecodeHandoff, HandoffState
from tandem.transfer.handoff.receiver import HandoffReceiver


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
        HandoffReceiver.claim,
        RemotePrefill.on_admitted,
        RemotePrefill.on_given_up,
    )

    def noted_claim(self: HandoffReceiver, asked: Claim, claimant: Any, stream: Any) -> bool:
        granted = claim(self, asked, claimant, stream)
        if granted:
            notes.add("claimed", request=self.request_id, prefill=asked.prefill_instance)
        return granted

    def noted_admit(self: RemotePrefill, first: Any) -> None:
        notes.add("admitted", request=self.active.request.request_id)
        admit(self, first)

    def noted_give_up(
        self: RemotePrefill, cause: CloseCause, detail: str, *, quarantined: bool
    ) -> None:
        notes.add("local", request=self.active.request.request_id, reason=detail, cause=cause)
        give_up(self, cause, detail, quarantined=quarantined)

    HandoffReceiver.claim = noted_claim  # type: ignore[method-assign]
    RemotePrefill.on_admitted = noted_admit  # type: ignore[method-assign]
    RemotePrefill.on_given_up = noted_give_up  # type: ignore[method-assign]


def flip_bits(probability: float, seed: int, notes: Notes) -> None:
    """Before a landed span is verified, one bit of it is flipped with this probability.

    Each flip is noted, and what became of it: `caught` by the worker; `moot` when the handoff had
    ended before the answer, so that nobody reads the block; else `missed`. A mismatch that is none
    of ours is `corrupt`. `counted` is what the worker's own metric says.
    """
    verify, verified, mismatched = (
        HandoffReceiver._verify,
        DecodeHandoff.verified,
        DecodeMetrics.mismatched,
    )
    draw = random.Random(seed)
    flipped: set[tuple[bytes, Span, int]] = set()

    async def verify_flipped(self: HandoffReceiver, work: Verify) -> None:
        machine = self.machine
        if not machine.is_live or draw.random() >= probability:
            await verify(self, work)
            return
        ordinal, block, _ = draw.choice(work.blocks)
        layers = work.span.layers
        flip = (machine.handoff_id, work.span, ordinal)
        flipped.add(flip)
        notes.add("flip")
        # [num_layers of the span, 2, num_kv_heads, block_size, head_dim]
        _flip_one(self._group.pool.tensor[block, layers.start : layers.stop], draw)
        await verify(self, work)
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

    HandoffReceiver._verify = verify_flipped  # type: ignore[method-assign]
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
