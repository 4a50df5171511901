"""The actions that a handoff asks of its decode worker, which carries them out in order."""

from dataclasses import dataclass

from tandem.runtime.wire.handoff_messages import CancelHandoff, FirstToken
from tandem.transfer.handoff.causes import CloseCause


@dataclass(frozen=True, slots=True)
class Span:
    """The part of each block that one write carries: layers of the heads that two ranks have."""

    prefill_rank: int
    decode_rank: int
    layers: range


@dataclass(frozen=True, slots=True)
class Verify:
    """Checksum this span of these blocks and call `verified` for each ordinal."""

    span: Span
    blocks: tuple[tuple[int, int, int], ...]  # (ordinal, block id, announced checksum)


@dataclass(frozen=True, slots=True)
class Admit:
    """Decode the prompt: all of its KV is proven, and its first token is here, if one comes."""

    first: FirstToken | None


@dataclass(frozen=True, slots=True)
class Retract:
    """Tell the prefill worker to stop."""

    prefill_instance: str
    message: CancelHandoff


@dataclass(frozen=True, slots=True)
class PrefillLocally:
    """Give the remote prefill up. `quarantined`: writes may still land in the fill blocks."""

    cause: CloseCause
    detail: str  # a sentence for people
    quarantined: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop the sequence. `quarantined`: writes may still land in the fill blocks."""

    quarantined: bool


@dataclass(frozen=True, slots=True)
class ReleaseQuarantined:
    """Free these blocks: nothing can land in them any more."""

    block_ids: tuple[int, ...]


Action = Verify | Admit | Retract | PrefillLocally | Abort | ReleaseQuarantined
