"""The causes that a handoff's decode side names; their values are metric labels."""

from enum import StrEnum


class CloseCause(StrEnum):
    """The cause for which a remote prefill was given up."""

    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    UNCLAIMED = "unclaimed"
    TAKEN_BACK = "taken_back"  # the worker that published the ticket is the better place by now
    QUEUE_LOST = "queue_lost"
    LEASE_EXPIRED = "lease_expired"
    PEER_LOST = "peer_lost"  # the prefill worker does not answer; it may still write
    PEER_GONE = "peer_gone"  # its process is dead
    CORRUPT = "corrupt"  # a block is not the one that was announced
    VIOLATION = "violation"  # a notice of something that was not granted, or of two contents
    INCOMPLETE = "incomplete"  # the prefill worker settled without having written everything
    FAILED = "failed"  # a write or a checksum failed


class DropCause(StrEnum):
    """The cause for which a message, or a part of one, was not applied."""

    STALE = "stale"
    LATE = "late"
    DUPLICATE = "duplicate"
    UNCLAIMED = "unclaimed"
    NOT_THE_CLAIMANT = "not the claimant"
    BAD_SECRET = "bad secret"
    UNKNOWN_SPAN = "unknown span"
    UNKNOWN_ORDINAL = "unknown ordinal"
    CONFLICT = "conflict"
    CHECKSUM = "checksum"
    CLAIM_STALE = "claim: stale"
    CLAIM_CANCELLED = "claim: cancelled"
    CLAIM_EXPIRED = "claim: expired"
