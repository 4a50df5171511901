"""The requests, chunks and configs of engines."""

from dataclasses import dataclass, field
from typing import Any, Literal, Required, TypedDict

from tandem.runtime.wire.bounds import Amount, Count
from tandem.runtime.wire.cluster_messages import StepCosts
from tandem.runtime.wire.messages import PrefillReport


class CompletionUsage(TypedDict):
    """Token counts of one answer; `total_tokens` is the sum of the others."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class BootstrapInfo(TypedDict):
    """The place at which the two engines of one request meet; the same for both."""

    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: int  # of this request alone


class GenerateRequest(TypedDict, total=False):
    """One sequence to generate. Read every key but `token_ids` with `.get`.

    `token_ids` is the prompt. When the request resumes the answer of a lost worker, `token_ids`
    ends with the `extra_args["num_generated"]` tokens generated so far, and the limits in
    `stop_conditions` are reduced by that number. Text engines get `messages` or `prompt`.
    """

    token_ids: Required[list[int]]
    model: str
    request_id: str
    sampling_options: dict[str, Any]  # temperature, top_p, top_k, seed, ..., grammar
    stop_conditions: dict[str, Any]  # max_tokens, min_tokens, stop_token_ids, ignore_eos
    output_options: dict[str, Any]  # logprobs: None, or the number of alternatives
    prefill_result: dict[str, Any]  # decode engines: {"disaggregated_params": ...}
    bootstrap_info: BootstrapInfo  # of both engines, while both are at work
    extra_args: dict[str, Any]
    routing: dict[str, Any]  # dp_rank
    images: list[bytes]  # PNG, JPEG, GIF or WebP, in the order of their marks in `token_ids`
    messages: list[dict[str, Any]]
    prompt: str
    body_fields: dict[str, Any]  # text engines: those of `EngineConfig.text_fields`, as sent


class VectorRequest(TypedDict, total=False):
    """Texts to make vectors of (`embed`), or pairs of texts to score (`score`).

    `token_ids` has the tokens of each, with the special tokens of the model's tokenizer.
    """

    token_ids: Required[list[list[int]]]
    kind: Required[Literal["embeddings", "rerank"]]
    model: str
    request_id: str
    dimensions: int | None  # of the vectors; None: the model's
    # Of each pair, the place of its second text's first token: of type 1, where a model has types
    second_starts: list[int]


class GenerateChunk(TypedDict, total=False):
    """A part of an answer. The last one, and only it, has a `finish_reason`.

    `log_probs` and `top_logprobs` have one entry per token of the chunk, or are left out together.
    Text engines give `text` instead of `token_ids`.
    """

    token_ids: Required[list[int]]
    index: Required[int]  # 0
    finish_reason: str  # stop, length, cancelled, error, or an engine's own name for these
    completion_usage: CompletionUsage  # with the finish reason
    disaggregated_params: dict[str, Any]  # prefill engines, with the finish reason
    log_probs: list[float]  # natural logarithms
    top_logprobs: list[list[dict[str, Any]]]  # rank, token_id, token, logprob; best first
    engine_data: dict[str, Any]
    prefill: PrefillReport  # with the first token, where the engine places prompts
    num_prompt_tokens: int  # with the first token, of a prompt with images: theirs included
    stop_reason: int | str  # the token or string that ended the answer; not part of it
    text: str
    delta: dict[str, Any]  # text engines, in chats: tool_calls, reasoning_content; beside `text`


@dataclass
class LlmRegistration:
    """The token engine's part of `EngineConfig`, as a value of its own."""

    context_length: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    data_parallel_size: int | None = None
    data_parallel_start_rank: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None


@dataclass
class EngineConfig:
    """The properties of a started engine. Only `model` is required; None is not advertised.

    Without `kv_cache_block_size` the router balances by load alone. A field that is None takes its
    value from `llm`. With a prefill engine's `bootstrap_port` both legs of a request run at once.
    """

    model: str
    served_model_name: str | None = None
    context_length: int | None = None  # tokens, prompt and answer together
    kv_cache_block_size: int | None = None  # tokens
    total_kv_blocks: int | None = None  # of one data-parallel rank
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    data_parallel_size: int | None = None
    data_parallel_start_rank: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    runtime_data: dict[str, Any] | None = None  # any JSON, for readers of the model card
    llm: LlmRegistration | None = None
    model_aliases: list[str] = field(default_factory=list)
    text_fields: list[str] = field(default_factory=list)  # of bodies, that a text engine reads
    supports_grammar: bool = False  # of `sampling_options["grammar"]`
    supports_token_rules: bool = False  # `allowed_token_ids` and `bad_words` of `sampling_options`
    supports_images: bool = False  # the `images` of requests
    endpoint_types: str | None = None  # instead of the worker's, where only the model tells

    def card_data(self) -> dict[str, Any]:
        """Return the `user_data` of the model card, for custom routers."""
        names = (
            "data_parallel_size", "data_parallel_start_rank", "bootstrap_host", "bootstrap_port",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**(self.runtime_data or {}), **given}

    def __post_init__(self) -> None:
        for name, value in vars(self.llm).items() if self.llm is not None else ():
            if getattr(self, name) is None:
                setattr(self, name, value)


@dataclass(frozen=True)
class ComponentSnapshot:
    """The state of a data-parallel rank: its KV cache and, if it reports `step_costs`, its load.

    A hit rate of None is not measured yet. Step costs are those of `tandem.sdk.StepCosts`, learned
    by the engine; with them its prompts are placed by prediction. A snapshot with a number below 0
    is not published: the last one stays, and the log says it once.
    """

    kv_used_blocks: Count
    kv_total_blocks: Count
    gpu_cache_usage: Amount  # 0 .. 1
    dp_rank: Count
    kv_cache_hit_rate: Amount | None = None  # 0 .. 1
    num_waiting_tokens: Count = 0  # of prompts, that no step has computed yet
    num_decodes: Count = 0  # sequences past their prompt
    decode_context: Count = 0  # tokens of these
    step_costs: StepCosts | None = None
