"""The messages of a handoff: ticket, claim, first token, settled, cancel, and cached blocks."""

from typing import Annotated, Literal

from msgspec import Meta

from tandem.runtime.wire.bounds import (
    U64,
    Amount,
    Count,
    Few,
    Id,
    Many,
    Message,
    Name,
    NumRanks,
    Ordinal,
    Payload,
    Positive,
    Table,
    Text,
    TokenId,
)
from tandem.runtime.wire.messages import Grammar, SamplingParams, StopConditions, TokenLogprobs

HandoffId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Notice = Annotated[bytes, Meta(max_length=2**20)]  # a message of the transfer plane


class PrefillJob(Message, frozen=True):
    """A ticket on the prefill queue: well under 1 KiB for a prompt of any length."""

    handoff_id: HandoffId  # random
    attempt: Ordinal
    deployment: Name  # `queue.deployment.deployment_id`; jobs of another are dropped
    decode_instance: Name
    decode_epoch: Name  # its transfer epoch
    num_tokens: Positive
    num_uncached_tokens: Count
    deadline_ms: Positive  # left at publish
    trace: Table[Text] = {}
    num_returns: Ordinal = 0  # by workers that could not begin it
    num_lost: Ordinal = 0  # deliveries before the last return that no worker answered


class Claim(Message, frozen=True):
    """A prefill worker asks the decode worker for a ticket's work, before it posts any write."""

    handoff_id: Id
    attempt: Ordinal
    prefill_instance: Name
    prefill_epoch: Name
    tp_size: NumRanks = 1  # ranks of the prefill worker, each of which writes its own heads
    run: Id = b""  # random id of this run of the ticket; the claim is valid for this run only


class Claimed(Message, frozen=True):
    """The decode worker grants a write lease: the prompt, and the blocks to fill."""

    secret: Id  # 16 bytes, random, in every Landed of this attempt
    lease_ms: Count
    token_ids: Payload  # the whole prompt, and the answer's tokens that exist already
    sampling: SamplingParams
    fill: Many[
        tuple[Ordinal, Ordinal]
    ]  # (ordinal in the block table, block id of the decode worker)
    cached_ordinals: Many[Ordinal]  # in the decode worker's cache; never sent
    cache_salt: Name = ""
    stop: StopConditions = StopConditions(max_tokens=1)  # its min_tokens bears on the first token
    num_generated: Count = 0  # the last of `token_ids`, of an answer that was begun elsewhere
    grammar: Grammar | None = None  # of the answer, which the first token begins


class ClaimRefused(Message, frozen=True):
    """The decode worker does not need this ticket's work, or not from this prefill worker."""

    reason: Literal["stale", "cancelled", "expired", "unknown", "excluded", "unregistered", "late"]


class CancelHandoff(Message, frozen=True):
    """The decode worker retracts a claim; the prefill worker stops posting writes and settles."""

    handoff_id: Id
    attempt: Ordinal


class FirstToken(Message, frozen=True):
    """The token that follows the prompt, sent before the KV has landed."""

    handoff_id: Id
    attempt: Ordinal
    secret: Id  # of the grant
    run: Id  # as in the claim
    token_id: TokenId
    logprobs: TokenLogprobs | None = None
    num_cached_tokens: Count = 0  # taken from the prefill worker's own prefix cache
    timeline_ms: Table[Amount] = {}  # stage |-> ms since the claim was answered


class Settled(Message, frozen=True):
    """Every write of the prefill worker for this attempt has ended; none can still land."""

    handoff_id: Id
    attempt: Ordinal
    num_completed: Count
    num_failed: Count
    error: Text = ""  # why the prefill worker gave up, if it did
    # (rank of the decode worker, Landed) of every completed write, in case one was lost
    notices: Many[tuple[Ordinal, Notice]] = []
    timeline_ms: Table[Amount] = {}  # stage |-> ms since the claim was answered
    run: Id = b""  # as in the claim


class PrefixRequest(Message, frozen=True):
    """A prefill worker asks for cached blocks of a claimed prompt, to READ them."""

    handoff_id: Id
    attempt: Ordinal
    secret: Id  # of the grant
    ordinals: Many[Ordinal]
    tp_size: NumRanks = 1


class PrefixBlocks(Message, frozen=True):
    """The decode worker's blocks of these ordinals. Empty: the claim is not valid."""

    blocks: Many[tuple[Ordinal, Ordinal]] = []  # (ordinal, block id)
    checksums: Few[Many[U64]] = []  # per stream, in the order of `streams`; one per block


class Ack(Message, frozen=True):
    """Received."""


ClaimAnswer = Claimed | ClaimRefused | CancelHandoff
