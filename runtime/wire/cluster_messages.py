"""The messages of a cluster: records in etcd (JSON), events on NATS, and commands to workers."""

from typing import Annotated, Literal

import msgspec

from tandem.runtime.wire.bounds import (
    Amount,
    Count,
    Few,
    Id,
    Integer,
    Many,
    Message,
    Name,
    Ordinal,
    Payload,
    Positive,
    Real,
    Seconds,
    Share,
    Table,
    Text,
    Value,
)

Role = Literal["frontend", "worker", "prefill", "decode"]  # of a process
RoleName = Literal["decode", "prefill"]  # of a worker, which may have both
WorkerRole = Literal["both", "decode", "prefill"]
ControlName = Literal["clear-prefix-cache", "profile"]

_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]  # of a step


class Instance(Message, frozen=True, tag=False):
    """A process that serves an endpoint."""

    namespace: Name
    component: Name  # frontend | prefill | decode
    endpoint: Name
    instance_id: Name
    address: Name  # host:port of its request plane (its HTTP address for a frontend)
    epoch: Name  # random, new at every start of the process
    model: Name = ""
    host: Name = ""
    pid: Count = 0
    pid_space: Name = ""  # processes with the same pid_space see one another's pids
    rank_pids: Few[Count] = []  # of a worker's further processes that write KV
    deployment: Name = ""  # of a worker, as in PrefillJob
    metrics: Name = ""  # host:port that serves GET /metrics, where a worker has one
    bootstrap: tuple[Name, Count] | None = None  # host and port of a prefill engine of the kit
    max_prompt_tokens: Count = 0  # that a worker can prefill; 0: not known


class AnswerRules(Message, frozen=True, tag=False):
    """The rules from text to answer, where a model's workers say more than its chat template."""

    tool_format: Name = ""  # of calls; empty: by the chat template
    reasoning_format: Name = ""
    reasons_first: bool = False  # answers begin with reasoning, also where no mark opens it
    shows_unused_tools: bool = False  # the template gets the tools of `tool_choice` "none"
    guided_calls: Literal["", "auto", "always"] = ""  # auto: with `parallel_tool_calls` false
    are_calls_strict: bool = False  # guided ones follow their schema, whatever their `strict`


class ModelCard(Message, frozen=True, tag=False):
    """The model behind a name; each of its workers puts one under its lease."""

    name: Name
    context_length: Count  # tokens, prompt and answer together
    block_size: Positive  # tokens
    vocab_size: Count
    files_digest: Name  # BLAKE2b of the files that ModelFiles carries, hex
    instance_id: Name
    created_s: Count  # unix seconds, for /v1/models only
    endpoint: Name = ""  # namespace.component.endpoint that answers its requests
    model_input: Literal["tokens", "text"] = "tokens"  # text: the worker tokenizes itself
    model_types: Few[Name] = msgspec.field(default_factory=lambda: ["chat", "completions"])
    migration_limit: Count | None = None  # None: the frontend's own
    user_data: Table[Value] = {}
    sends_kv_events: bool = False
    total_kv_blocks: Count | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    weights_digest: Name = ""  # workers with other weights do not replace one another
    supports_grammar: bool = False  # of GenerateRequest
    answers: AnswerRules = AnswerRules()
    supports_token_rules: bool = False  # allowed_token_ids and bad_words of SamplingParams
    supports_images: bool = False  # of GenerateRequest


class RankMetadata(Message, frozen=True, tag=False):
    """The address of the KV pool of one rank of a worker."""

    agent_metadata: Payload
    device_id: Ordinal
    base_address: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class TransferMetadata(Message, frozen=True, tag=False):
    """The addresses of a worker's KV pools; `layout_hash` is compared before `ranks` is read."""

    instance_id: Name
    epoch: Name
    layout_hash: Name
    layout: Text  # human-readable, for the error that names both
    transport: Name  # nixl | ucx | loopback
    memory: Literal["DRAM", "VRAM"]
    block_bytes: Count  # of one rank
    num_blocks: Count  # for sequences
    num_spare_blocks: Count  # after them, where links are measured
    ranks: Few[RankMetadata]  # each with its share of the KV heads, in order
    address: Name = ""  # host:port of its request plane, which takes claims
    model: Name = ""
    deployment: Name = ""  # as in PrefillJob


class KvEvent(Message, frozen=True):
    """Blocks that entered or left a decode worker's prefix cache. `event_id` has no gaps."""

    instance_id: Name
    epoch: Name
    event_id: Count
    stored: Many[Id] = []  # block hashes
    removed: Many[Id] = []
    cleared: bool = False


def positions_of(num_tokens: float, start: float = 0.0) -> float:
    """Return the sum of the positions of so many tokens from `start` on, as costs count them."""
    return num_tokens * (start + num_tokens / 2)


class StepCosts(Message, frozen=True, tag=False):
    """The learned time of a worker's steps: linear in tokens and in tokens of context."""

    # Of a step with decodes, per decode, per context token
    decode_s: tuple[Seconds, Seconds, Seconds]
    # Of a step with prompts, per token, per token's position
    prompt_s: tuple[Seconds, Seconds, Seconds]
    max_step_s: Seconds  # of a step with decodes
    max_tokens: _Tokens  # of a step
    max_tokens_beside: _Tokens  # of prompts, in a step with decodes
    has_target: bool = False  # max_step_s is no longer than a target of the config
    ttft_target_s: Seconds | None = None  # of the first token, by the config
    # Of the smaller of the decodes' constant and the prompts' cost without that of positions, in a
    # step with both.
    hidden_share: Share = 0.0
    prompt_floor_s: Seconds = 0.0  # that a step with prompts takes, however few; 0: none is known
    tile_tokens: _Tokens = (
        1  # the tokens of a step with prompts cost as many as a multiple of these
    )
    longest_local: Count = 0  # tokens of a prompt that is never computed elsewhere, by the config


class LoadReport(Message, frozen=True):
    """A worker's load, several times a second."""

    instance_id: Name
    epoch: Name
    role: WorkerRole
    num_running: Count
    num_waiting: Count
    num_waiting_tokens: Count
    num_blocks: Count
    num_free_blocks: Count
    num_cached_blocks: Count
    num_decodes: Count = 0  # sequences past their prompt
    decode_context: Count = 0  # tokens of these
    costs: StepCosts | None = None  # None: not learned yet
    max_num_seqs: Count = 0  # batch rows; 0: not known
    num_own_prompt_tokens: Count = 0  # of num_waiting_tokens: the sender takes tickets after these
    waiting_context: Count = 0  # the positions of num_waiting_tokens, summed


class LinkReport(Message, frozen=True, tag=False):
    """The link from a prefill worker to a decode worker, measured when it was connected."""

    decode_instance: Name
    transport: Name
    memory: Name
    write_bytes_per_s: Amount
    overhead_us: Amount  # of one write, from the decision to the notice of its end
    min_streaming_tokens: Count | None  # longer last chunks go by groups of layers; None: none does
    is_broken: bool = False  # a transfer failed; the next one connects again


class WorkerControl(Message, frozen=True):
    """A command of an operator to a worker; the answer is a ControlOutcome."""

    name: ControlName
    duration_ms: Count = 1000  # of a profile


class ControlOutcome(Message, frozen=True):
    """The answer of a worker's `control` endpoint."""

    message: Text


class RoleChange(Message, frozen=True):
    """A request to a worker to change its role; the answer is a WorkerStatus."""

    role: WorkerRole


def role_names(role: WorkerRole) -> tuple[RoleName, ...]:
    """Return the roles that `role` stands for."""
    return ("decode", "prefill") if role == "both" else (role,)


class WorkerStatus(Message, frozen=True):
    """The answer of a worker's `status` endpoint."""

    instance: Instance
    state: Name
    load: LoadReport
    details: Table[Text | Integer | Real | bool] = {}
    links: Few[LinkReport] = []

    def count(self, name: str) -> int:
        """Return a detail that counts something; 0 where there is no such detail."""
        value = self.details.get(name)
        return value if isinstance(value, int) else 0
