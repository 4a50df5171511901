"""Every message that crosses a wire: frozen, tagged structs in msgpack.

Token ids travel as little-endian u32 bytes (`pack_tokens`), durations as milliseconds; no message
carries a clock reading of another host. Messages are grouped by who receives them.
"""

import sys
from array import array
from typing import Any, Literal

import msgspec

PrefillPlace = Literal["local", "remote"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
Role = Literal["frontend", "prefill", "decode"]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all wire messages; the tag is the class name."""


def pack_tokens(token_ids: list[int]) -> bytes:
    """Token ids as little-endian u32 bytes. Raises OverflowError outside 0 .. 2**32 - 1."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of `pack_tokens`. Raises ValueError when the length is not a multiple of 4."""
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


# ---- parts ------------------------------------------------------------------------------------


class SamplingParams(Message, frozen=True):
    """How a token is drawn. The draw for position p depends on (seed, p) alone."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}  # token id |-> added to its logit
    seed: int = 0  # u64
    logprobs: int | None = None  # None is off, 0 the chosen token's only, k also the k best


class StopConditions(Message, frozen=True):
    """When a sequence ends. Stop strings are the frontend's: workers see token ids only."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False


class TokenLogprobs(Message, frozen=True, array_like=True, tag=False):
    """Natural-log probabilities of one generated token; `top` is sorted, best first."""

    logprob: float
    top: list[tuple[int, float]] = []  # (token id, logprob)


class PrefillReport(Message, frozen=True, tag=False):
    """Where a request's prompt was computed, and why; sent with the first token."""

    place: PrefillPlace
    reason: str  # e.g. "uncached 37 <= max_local_prefill_length 1000"
    num_cached_tokens: int = 0
    prefill_instance: str | None = None
    timeline_ms: dict[str, float] = {}  # stage |-> ms since the worker received the request


# ---- to a decode worker, from a frontend ------------------------------------------------------


class GenerateRequest(Message, frozen=True):
    """One sequence to generate. `deadline_ms` is the time left when it was sent.

    The last `num_generated` of `token_ids` are of the answer: another worker said them before it
    was lost, and this one goes on behind them. `stop` counts from the answer's first token.
    """

    request_id: str
    model: str
    token_ids: bytes
    sampling: SamplingParams
    stop: StopConditions
    deadline_ms: int
    cache_salt: str = ""  # tenants with different salts never share blocks
    prefill_place: PrefillPlace | None = None  # a caller's wish, over the policy
    num_generated: int = 0


class TextRequest(Message, frozen=True):
    """A request for a worker that makes and reads text itself; answered with JSON objects.

    `body` is the client's, as JSON; the answer is one whole response of that kind, or its chunks.
    """

    request_id: str
    model: str
    kind: Literal["chat", "completions"]
    body: bytes
    deadline_ms: int


# ---- to a worker of the kit, from anyone ------------------------------------------------------


class Call(Message, frozen=True):
    """Any plain value, for an endpoint's handler; answered with plain values in msgpack."""

    data: msgspec.Raw


# ---- to a frontend, from a decode worker ------------------------------------------------------


class TokenDelta(Message, frozen=True, array_like=True, tag=False):
    """A sequence's new tokens of one engine step. Only the last delta has a finish_reason."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None  # one per token id, or None
    prefill: PrefillReport | None = None  # on the first delta only
    stop_token_id: int | None = None  # the token that ended it, which is not in token_ids
    timeline_ms: dict[str, float] | None = None  # the whole request's, on its terminal delta


class ModelFiles(Message, frozen=True):
    """What a frontend needs of a model folder: file name |-> contents (no weights)."""

    files: dict[str, bytes]


# ---- the handoff (HANDOFF: ticket, claim, first token, landed, settled, cancel) ---------------


class PrefillJob(Message, frozen=True):
    """A ticket on the prefill queue: well under 1 KiB whatever the prompt's length."""

    handoff_id: bytes  # 16 bytes, random
    attempt: int
    deployment: str  # epoch of the deployment; jobs of another are dropped
    decode_instance: str
    decode_address: str  # host:port of its request plane
    decode_epoch: str  # its transfer epoch
    num_tokens: int
    num_uncached_tokens: int
    deadline_ms: int  # left at publish
    trace: dict[str, str] = {}


class Claim(Message, frozen=True):
    """P asks D for the work behind a ticket. No write is posted before the answer."""

    handoff_id: bytes
    attempt: int
    prefill_instance: str
    prefill_epoch: str
    tp_size: int = 1  # ranks of P, each of which writes its own heads
    run: bytes = b""  # random, of this run of the ticket; no other one has a part in the claim


class Claimed(Message, frozen=True):
    """D grants a write lease: what to compute, and which of D's blocks to fill."""

    secret: bytes  # 16 bytes, random, in every Landed of this attempt
    lease_ms: int
    token_ids: bytes  # the whole prompt, and what is known of the answer
    sampling: SamplingParams
    fill: list[tuple[int, int]]  # (ordinal in the prompt, block id at D)
    cached_ordinals: list[int]  # D has them; never sent
    cache_salt: str = ""
    stop: StopConditions = StopConditions(max_tokens=1)  # its min_tokens bears on the first token
    num_generated: int = 0  # the last of `token_ids`, of an answer that was begun elsewhere


class ClaimRefused(Message, frozen=True):
    """D does not want this ticket any more."""

    reason: Literal["stale", "cancelled", "expired", "unknown", "excluded"]


class CancelHandoff(Message, frozen=True):
    """D retracts a claim; P stops posting writes and settles."""

    handoff_id: bytes
    attempt: int


class FirstToken(Message, frozen=True):
    """The token that follows the prompt, sent before the KV has landed."""

    handoff_id: bytes
    attempt: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    num_cached_tokens: int = 0  # taken from P's own prefix cache
    timeline_ms: dict[str, float] = {}  # stage |-> ms since the claim was answered


class Settled(Message, frozen=True):
    """Every write P posted under this attempt is complete or failed; none can still land."""

    handoff_id: bytes
    attempt: int
    num_completed: int
    num_failed: int
    error: str = ""  # why P gave up, if it did
    # (rank of D, Landed) of every write that completed, should one have been lost
    notices: list[tuple[int, bytes]] = []
    timeline_ms: dict[str, float] = {}  # stage |-> ms since the claim was answered
    run: bytes = b""  # as in the claim


class PrefixRequest(Message, frozen=True):
    """P asks where D's cached blocks of a claimed prompt are, to READ them."""

    handoff_id: bytes
    attempt: int
    ordinals: list[int]
    tp_size: int = 1


class PrefixBlocks(Message, frozen=True):
    """D's blocks of these ordinals, and what they hold. Empty: the claim does not stand."""

    blocks: list[tuple[int, int]] = []  # (ordinal, block id)
    checksums: list[list[int]] = []  # per stream, in the order of `streams`; one per block


class Ack(Message, frozen=True):
    """Heard."""


ClaimAnswer = Claimed | ClaimRefused | CancelHandoff


# ---- discovery (JSON in etcd) -----------------------------------------------------------------


class Instance(Message, frozen=True, tag=False):
    """A process that serves an endpoint."""

    namespace: str
    component: str  # frontend | prefill | decode
    endpoint: str
    instance_id: str
    address: str  # host:port of its request plane (its HTTP address for a frontend)
    epoch: str  # new at every start of the process
    model: str = ""
    host: str = ""
    pid: int = 0
    pid_space: str = ""  # processes of equal pid_space see one another's pids


class ModelCard(Message, frozen=True, tag=False):
    """What is served under a model's name; every worker of it puts one under its lease."""

    name: str
    context_length: int  # tokens, prompt and answer together
    block_size: int  # tokens
    vocab_size: int
    files_digest: str  # BLAKE2b of the files that ModelFiles carries, hex
    instance_id: str
    created_s: int  # unix seconds, for /v1/models only
    endpoint: str = ""  # namespace.component.endpoint that answers its requests
    model_input: Literal["tokens", "text"] = "tokens"  # text: the worker tokenizes itself
    model_types: list[str] = msgspec.field(default_factory=lambda: ["chat", "completions"])
    migration_limit: int | None = None  # None: the frontend's own
    user_data: dict[str, Any] = {}
    sends_kv_events: bool = False
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    weights_digest: str = ""  # workers whose weights differ don't answer for one another


class RankMetadata(Message, frozen=True, tag=False):
    """How to reach the KV pool of one rank of a worker."""

    agent_metadata: bytes
    device_id: int
    base_address: int


class TransferMetadata(Message, frozen=True, tag=False):
    """How to reach a worker's KV pools; compared by layout_hash before anything of `ranks`."""

    instance_id: str
    epoch: str
    layout_hash: str
    layout: str  # human-readable, for the error that names both
    transport: str  # nixl | ucx | loopback
    memory: Literal["DRAM", "VRAM"]
    block_bytes: int  # of one rank
    num_blocks: int  # for sequences
    num_spare_blocks: int  # behind them, where transfers may try themselves out
    ranks: list[RankMetadata]  # each with its share of the KV heads, in order


# ---- events (NATS core) -----------------------------------------------------------------------


class KvEvent(Message, frozen=True):
    """Blocks that entered or left a decode worker's prefix cache. `event_id` has no gaps."""

    instance_id: str
    epoch: str
    event_id: int
    stored: list[bytes] = []  # block hashes
    removed: list[bytes] = []
    cleared: bool = False


class LoadReport(Message, frozen=True):
    """A worker's load, on change and at least once a second."""

    instance_id: str
    epoch: str
    role: Role
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int


class LinkReport(Message, frozen=True, tag=False):
    """What a prefill worker has measured of its way to a decode worker when they met."""

    decode_instance: str
    transport: str
    memory: str
    write_bytes_per_s: float
    read_bytes_per_s: float  # checksums included
    overhead_us: float  # of one write, from the decision to the news of its end
    min_streaming_tokens: int | None  # last chunks from here on go by groups of layers; None: never
    is_broken: bool = False  # a transfer failed; the next one connects again


class WorkerStatus(Message, frozen=True):
    """The answer of a worker's `status` endpoint."""

    instance: Instance
    state: str
    load: LoadReport
    details: dict[str, str | int | float | bool] = {}
    links: list[LinkReport] = []


def encode(message: msgspec.Struct) -> bytes:
    """The message in msgpack."""
    return _ENCODER.encode(message)


_ENCODER = msgspec.msgpack.Encoder()
