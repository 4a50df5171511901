"""The messages of a handoff: ticket, claim, first token, settled, cancel, and cached blocks."""

from typing import Literal

from tandem.runtime.messages import Grammar, Message, SamplingParams, StopConditions, TokenLogprobs


class PrefillJob(Message, frozen=True):
    """A ticket on the prefill queue: well under 1 KiB for a prompt of any length."""

    handoff_id: bytes  # 16 bytes, random
    attempt: int
    deployment: str  # `queue.deployment.deployment_id`; jobs of another are dropped
    decode_instance: str
    decode_epoch: str  # its transfer epoch
    num_tokens: int
    num_uncached_tokens: int
    deadline_ms: int  # left at publish
    trace: dict[str, str] = {}


class Claim(Message, frozen=True):
    """A prefill worker asks the decode worker for a ticket's work, before it posts any write."""

    handoff_id: bytes
    attempt: int
    prefill_instance: str
    prefill_epoch: str
    tp_size: int = 1  # ranks of the prefill worker, each of which writes its own heads
    run: bytes = b""  # random id of this run of the ticket; the claim is valid for this run only


class Claimed(Message, frozen=True):
    """The decode worker grants a write lease: the prompt, and the blocks to fill."""

    secret: bytes  # 16 bytes, random, in every Landed of this attempt
    lease_ms: int
    token_ids: bytes  # the whole prompt, and the answer's tokens that exist already
    sampling: SamplingParams
    fill: list[tuple[int, int]]  # (ordinal in the block table, block id of the decode worker)
    cached_ordinals: list[int]  # in the decode worker's cache; never sent
    cache_salt: str = ""
    stop: StopConditions = StopConditions(max_tokens=1)  # its min_tokens bears on the first token
    num_generated: int = 0  # the last of `token_ids`, of an answer that was begun elsewhere
    grammar: Grammar | None = None  # of the answer, which the first token begins


class ClaimRefused(Message, frozen=True):
    """The decode worker does not need this ticket's work, or not from this prefill worker."""

    reason: Literal["stale", "cancelled", "expired", "unknown", "excluded", "unregistered", "late"]


class CancelHandoff(Message, frozen=True):
    """The decode worker retracts a claim; the prefill worker stops posting writes and settles."""

    handoff_id: bytes
    attempt: int


class FirstToken(Message, frozen=True):
    """The token that follows the prompt, sent before the KV has landed."""

    handoff_id: bytes
    attempt: int
    secret: bytes  # of the grant
    run: bytes  # as in the claim
    token_id: int
    logprobs: TokenLogprobs | None = None
    num_cached_tokens: int = 0  # taken from the prefill worker's own prefix cache
    timeline_ms: dict[str, float] = {}  # stage |-> ms since the claim was answered


class Settled(Message, frozen=True):
    """Every write of the prefill worker for this attempt has ended; none can still land."""

    handoff_id: bytes
    attempt: int
    num_completed: int
    num_failed: int
    error: str = ""  # why the prefill worker gave up, if it did
    # (rank of the decode worker, Landed) of every completed write, in case one was lost
    notices: list[tuple[int, bytes]] = []
    timeline_ms: dict[str, float] = {}  # stage |-> ms since the claim was answered
    run: bytes = b""  # as in the claim


class PrefixRequest(Message, frozen=True):
    """A prefill worker asks for cached blocks of a claimed prompt, to READ them."""

    handoff_id: bytes
    attempt: int
    secret: bytes  # of the grant
    ordinals: list[int]
    tp_size: int = 1


class PrefixBlocks(Message, frozen=True):
    """The decode worker's blocks of these ordinals. Empty: the claim is not valid."""

    blocks: list[tuple[int, int]] = []  # (ordinal, block id)
    checksums: list[list[int]] = []  # per stream, in the order of `streams`; one per block


class Ack(Message, frozen=True):
    """Received."""


ClaimAnswer = Claimed | ClaimRefused | CancelHandoff
