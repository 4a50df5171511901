"""Every message that crosses a wire: frozen, tagged structs in msgpack.

Token ids travel as little-endian u32 bytes (`pack_tokens`), durations as milliseconds; no message
carries a clock reading of another host. Messages are grouped by their receiver.
"""

import sys
from array import array
from typing import Annotated, Any, Literal

import msgspec

from tandem.runtime.prompt_logprobs import PromptLogprobs

PrefillPlace = Literal["local", "remote"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
Role = Literal["frontend", "worker", "prefill", "decode"]  # of a process
RoleName = Literal["decode", "prefill"]  # of a worker, which may have both
WorkerRole = Literal["both", "decode", "prefill"]
ControlName = Literal["clear-prefix-cache", "profile"]
GrammarKind = Literal["json_schema", "regex", "lark", "gbnf", "structural_tag"]

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]  # not NaN either
TargetMs = Annotated[float, msgspec.Meta(gt=0, le=3_600_000)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]  # of a step

# The errors of decoding bytes that are no message; RecursionError comes from deep nesting.
DECODE_ERRORS = (msgspec.MsgspecError, RecursionError)


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all wire messages; the tag is the class name."""


def pack_tokens(token_ids: list[int]) -> bytes:
    """Return token ids as little-endian u32 bytes. Raise OverflowError outside 0 .. 2**32 - 1."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """Invert `pack_tokens`. Raise ValueError when the length is not a multiple of 4."""
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


# ---- parts ------------------------------------------------------------------------------------


class SamplingParams(Message, frozen=True):
    """Parameters of sampling. The draw for position p depends on (seed, p) alone."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}  # token id |-> added to its logit
    seed: int = 0  # u64
    logprobs: int | None = None  # None: none; 0: the chosen token's; k: also those of the k best
    prompt_logprobs: bool = False  # those of the prompt's tokens too, as `logprobs` says


class StopConditions(Message, frozen=True):
    """Conditions that end a sequence. The frontend handles stop strings: workers see token ids."""

    max_tokens: int  # 0: the prompt is computed, nothing is generated
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False


class Grammar(Message, frozen=True, tag=False):
    """The rules that an answer follows. Workers whose card has `supports_grammar` take one."""

    kind: GrammarKind
    source: str  # a JSON schema as JSON, a regex, or a grammar of that kind


class TokenLogprobs(Message, frozen=True, array_like=True, tag=False):
    """Natural-log probabilities of one generated token; `top` is sorted, best first."""

    logprob: float
    top: list[tuple[int, float]] = []  # (token id, logprob)


class PrefillReport(Message, frozen=True, tag=False):
    """The place of a request's prefill, and the reason; sent with the first token."""

    place: PrefillPlace
    reason: str  # e.g. "uncached 37 <= max_local_prefill_length 1000"
    num_cached_tokens: int = 0
    prefill_instance: str | None = None
    timeline_ms: dict[str, float] = {}  # stage |-> ms since the worker received the request
    cause: str = ""  # the reason without its numbers; empty from an engine of the kit
    predicted_ms: float = 0.0  # from receiving the request to its first token; 0: not known


# ---- to a decode worker, from a frontend ------------------------------------------------------


class Targets(Message, frozen=True):
    """A caller's own targets for the place of a prompt, instead of the decode worker's."""

    ttft_ms: TargetMs | None = None
    itl_ms: TargetMs | None = None


class GenerateRequest(Message, frozen=True):
    """One sequence to generate. `deadline_ms` is the time left when it was sent.

    The last `num_generated` of `token_ids` belong to the answer: another worker generated them
    before it was lost, and this one resumes after them. `stop` counts from the first of them.
    """

    request_id: str
    model: str
    token_ids: bytes
    sampling: SamplingParams
    stop: StopConditions
    deadline_ms: int
    cache_salt: str = ""  # tenants with different salts never share blocks
    prefill_place: PrefillPlace | None = None  # the caller's choice, instead of the policy's
    num_generated: int = 0
    grammar: Grammar | None = None  # None: any answer
    targets: Targets | None = None


class TextRequest(Message, frozen=True):
    """A request for a worker that reads and writes text; the answer is JSON objects.

    `body` is the client's JSON; the answer is one whole response of that kind, or its chunks.
    """

    request_id: str
    model: str
    kind: Literal["chat", "completions"]
    body: bytes
    deadline_ms: int


# ---- to a worker of the kit, from anyone ------------------------------------------------------


class Call(Message, frozen=True):
    """Any plain value, for an endpoint's handler; the answers are plain values in msgpack."""

    data: msgspec.Raw


# ---- to a frontend, from a decode worker ------------------------------------------------------


class TokenDelta(Message, frozen=True, array_like=True, tag=False):
    """A sequence's new tokens of one engine step. Only the last delta has a finish_reason."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    # One per token id; after `prompt_logprobs` the stop token has one too.
    logprobs: list[TokenLogprobs] | None = None
    prefill: PrefillReport | None = None  # on the first delta only
    stop_token_id: int | None = None  # the token that ended it, which is not in token_ids
    timeline_ms: dict[str, float] | None = None  # the whole request's, on its terminal delta
    prompt_logprobs: PromptLogprobs | None = None  # on the first delta only


class ModelFiles(Message, frozen=True):
    """The files of a model folder that a frontend needs: name |-> contents (no weights)."""

    files: dict[str, bytes]


# ---- the handoff (HANDOFF: ticket, claim, first token, landed, settled, cancel) ---------------


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


# ---- discovery (JSON in etcd) -----------------------------------------------------------------


class Instance(Message, frozen=True, tag=False):
    """A process that serves an endpoint."""

    namespace: str
    component: str  # frontend | prefill | decode
    endpoint: str
    instance_id: str
    address: str  # host:port of its request plane (its HTTP address for a frontend)
    epoch: str  # random, new at every start of the process
    model: str = ""
    host: str = ""
    pid: int = 0
    pid_space: str = ""  # processes with the same pid_space see one another's pids
    deployment: str = ""  # of a worker, as in PrefillJob
    metrics: str = ""  # host:port that serves GET /metrics, where a worker has one


class ModelCard(Message, frozen=True, tag=False):
    """The model behind a name; each of its workers puts one under its lease."""

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
    weights_digest: str = ""  # workers with other weights do not replace one another
    supports_grammar: bool = False  # of GenerateRequest


class RankMetadata(Message, frozen=True, tag=False):
    """The address of the KV pool of one rank of a worker."""

    agent_metadata: bytes
    device_id: int
    base_address: int


class TransferMetadata(Message, frozen=True, tag=False):
    """The addresses of a worker's KV pools; `layout_hash` is compared before `ranks` is read."""

    instance_id: str
    epoch: str
    layout_hash: str
    layout: str  # human-readable, for the error that names both
    transport: str  # nixl | ucx | loopback
    memory: Literal["DRAM", "VRAM"]
    block_bytes: int  # of one rank
    num_blocks: int  # for sequences
    num_spare_blocks: int  # after them, where links are measured
    ranks: list[RankMetadata]  # each with its share of the KV heads, in order
    address: str = ""  # host:port of its request plane, which takes claims
    model: str = ""
    deployment: str = ""  # as in PrefillJob


# ---- events (NATS core) -----------------------------------------------------------------------


class KvEvent(Message, frozen=True):
    """Blocks that entered or left a decode worker's prefix cache. `event_id` has no gaps."""

    instance_id: str
    epoch: str
    event_id: int
    stored: list[bytes] = []  # block hashes
    removed: list[bytes] = []
    cleared: bool = False


class StepCosts(Message, frozen=True, tag=False):
    """The learned time of a worker's steps: linear in tokens and in tokens of context."""

    # Of a step with decodes, per decode, per context token
    decode_s: tuple[_Seconds, _Seconds, _Seconds]
    # Of a step with prompts, per token, per token's position
    prompt_s: tuple[_Seconds, _Seconds, _Seconds]
    max_step_s: _Seconds  # of a step with decodes
    max_tokens: _Tokens  # of a step
    max_tokens_beside: _Tokens  # of prompts, in a step with decodes
    has_target: bool = False  # max_step_s is no longer than a target of the config


class LoadReport(Message, frozen=True):
    """A worker's load, several times a second."""

    instance_id: str
    epoch: str
    role: WorkerRole
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_decodes: int = 0  # sequences past their prompt
    decode_context: int = 0  # tokens of these
    costs: StepCosts | None = None  # None: not learned yet


class LinkReport(Message, frozen=True, tag=False):
    """The link from a prefill worker to a decode worker, measured when it was connected."""

    decode_instance: str
    transport: str
    memory: str
    write_bytes_per_s: float
    overhead_us: float  # of one write, from the decision to the notice of its end
    min_streaming_tokens: int | None  # longer last chunks go by groups of layers; None: none does
    is_broken: bool = False  # a transfer failed; the next one connects again


class WorkerControl(Message, frozen=True):
    """A command of an operator to a worker; the answer is a ControlOutcome."""

    name: ControlName
    duration_ms: int = 1000  # of a profile


class ControlOutcome(Message, frozen=True):
    """The answer of a worker's `control` endpoint."""

    message: str


class RoleChange(Message, frozen=True):
    """A request to a worker to change its role; the answer is a WorkerStatus."""

    role: WorkerRole


def role_names(role: WorkerRole) -> tuple[RoleName, ...]:
    """Return the roles that `role` stands for."""
    return ("decode", "prefill") if role == "both" else (role,)


class WorkerStatus(Message, frozen=True):
    """The answer of a worker's `status` endpoint."""

    instance: Instance
    state: str
    load: LoadReport
    details: dict[str, str | int | float | bool] = {}
    links: list[LinkReport] = []


def encode(message: msgspec.Struct) -> bytes:
    """Return the message in msgpack."""
    return _ENCODER.encode(message)


_ENCODER = msgspec.msgpack.Encoder()
