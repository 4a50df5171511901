"""The messages of a cluster: records in etcd (JSON), events on NATS, and commands to workers."""

from typing import Annotated, Any, Literal

import msgspec

from tandem.runtime.messages import Message

Role = Literal["frontend", "worker", "prefill", "decode"]  # of a process
RoleName = Literal["decode", "prefill"]  # of a worker, which may have both
WorkerRole = Literal["both", "decode", "prefill"]
ControlName = Literal["clear-prefix-cache", "profile"]

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]  # not NaN either
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]  # of a step


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
    bootstrap: tuple[str, int] | None = None  # host and port of a prefill engine of the kit
    max_prompt_tokens: int = 0  # that a worker can prefill; 0: not known


class AnswerRules(Message, frozen=True, tag=False):
    """How the text of a model becomes an answer, where its workers say more than its template."""

    tool_format: str = ""  # of calls; empty: by the chat template
    reasoning_format: str = ""
    reasons_first: bool = False  # answers begin with reasoning, also where no mark opens it
    shows_unused_tools: bool = False  # the template gets the tools of `tool_choice` "none"
    guided_calls: Literal["", "auto", "always"] = ""  # auto: with `parallel_tool_calls` false
    are_calls_strict: bool = False  # guided ones follow their schema, whatever their `strict`


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
    answers: AnswerRules = AnswerRules()
    supports_token_rules: bool = False  # allowed_token_ids and bad_words of SamplingParams


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
    ttft_target_s: _Seconds | None = None  # of the first token, by the config
    # Of the smaller of the decodes' constant and the prompts' cost, in a step with both.
    hidden_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


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
    max_num_seqs: int = 0  # batch rows; 0: not known


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
