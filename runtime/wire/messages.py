"""Every message that crosses a wire is a frozen, tagged struct in msgpack: here those of requests.

Those of handoffs and of the cluster stand in `handoff_messages` and `cluster_messages`. Token ids
travel as little-endian u32 bytes (`pack_tokens`), durations as milliseconds; no message carries a
clock reading of another host. Messages are grouped by their receiver. The type of each field has
its bounds (`bounds`), and `decoding` refuses a message that does not keep them.
"""

import sys
from array import array
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.runtime.wire.bounds import (
    LARGEST_INT,
    LARGEST_REAL,
    LEAST_REPETITION_PENALTY,
    U64,
    Amount,
    Count,
    Many,
    Message,
    Name,
    Payload,
    Real,
    Share,
    Table,
    Text,
    TokenId,
)
from tandem.runtime.wire.prompt_logprobs import PromptLogprobs

PrefillPlace = Literal["local", "remote"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
GrammarKind = Literal["json_schema", "regex", "lark", "gbnf", "structural_tag"]
TargetMs = Annotated[float, Meta(gt=0, le=3_600_000)]
VectorKind = Literal["embeddings", "rerank"]
MAX_INPUTS = 64  # of one VectorRequest
MAX_DIMENSIONS = 2**16
MAX_IMAGES = 256  # of one GenerateRequest
MAX_ROUTED = 16  # decode workers that a request names, of those compared the cheapest
_Column = Annotated[list[Real], Meta(max_length=MAX_ROUTED)]

LARGEST_GRAMMAR_BYTES = 2**18  # of a grammar's source in UTF-8
_Parameter = Annotated[int, Meta(ge=0, le=LARGEST_INT)]
_Penalty = Annotated[float, Meta(ge=-LARGEST_REAL, le=LARGEST_REAL)]
_Repetition = Annotated[float, Meta(ge=LEAST_REPETITION_PENALTY, le=LARGEST_REAL)]
# Token id |-> added to its logit
_Biases = Annotated[dict[TokenId, _Penalty], Meta(max_length=2**20)]
_BadWord = Annotated[list[TokenId], Meta(min_length=1, max_length=256)]
_BadWords = Annotated[list[_BadWord], Meta(max_length=1024)]
_Source = Annotated[str, Meta(max_length=LARGEST_GRAMMAR_BYTES)]


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

    temperature: Annotated[float, Meta(ge=0, le=LARGEST_REAL)] = 1.0  # 0 is greedy
    top_p: Share = 1.0
    top_k: _Parameter = 0  # 0 is off
    min_p: Share = 0.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: _Repetition = 1.0
    logit_bias: _Biases = {}
    seed: U64 = 0
    logprobs: Count | None = None  # None: none; 0: the chosen token's; k: also those of the k best
    prompt_logprobs: bool = False  # those of the prompt's tokens too, as `logprobs` says
    # Of workers whose card has `supports_token_rules`.
    allowed_token_ids: Many[TokenId] = []  # empty: all
    bad_words: _BadWords = []  # tokens of each; its last never follows the others


class StopConditions(Message, frozen=True):
    """Conditions that end a sequence. The frontend handles stop strings: workers see token ids."""

    max_tokens: _Parameter  # 0: the prompt is computed, nothing is generated
    min_tokens: _Parameter = 0
    stop_token_ids: Many[TokenId] = []
    ignore_eos: bool = False


class Grammar(Message, frozen=True, tag=False):
    """The rules that an answer follows. Workers whose card has `supports_grammar` take one."""

    kind: GrammarKind
    source: _Source  # a JSON schema as JSON, a regex, or a grammar of that kind


class TokenLogprobs(Message, frozen=True, array_like=True, tag=False):
    """Natural-log probabilities of one generated token; `top` is sorted, best first."""

    logprob: Real
    top: Many[tuple[TokenId, Real]] = []  # (token id, logprob)


class PrefillReport(Message, frozen=True, tag=False):
    """The place of a request's prefill, and the reason; sent with the first token."""

    place: PrefillPlace
    reason: Text  # e.g. "uncached 37 <= max_local_prefill_length 1000"
    num_cached_tokens: Count = 0
    prefill_instance: Name | None = None
    timeline_ms: Table[Amount] = {}  # stage |-> ms since the worker received the request
    cause: Name = ""  # the reason without its numbers; empty from an engine of the kit
    predicted_ms: Amount = 0.0  # from receiving the request to its first token; 0: not known


# ---- to a decode worker, from a frontend ------------------------------------------------------


class Targets(Message, frozen=True):
    """A caller's own targets for the place of a prompt, instead of the decode worker's."""

    ttft_ms: TargetMs | None = None
    itl_ms: TargetMs | None = None


class Routed(Message, frozen=True, array_like=True, tag=False):
    """The decode workers that the frontend compared for a prompt, in columns of one order."""

    instance_ids: Annotated[list[Name], Meta(max_length=MAX_ROUTED)]
    first_token_s: _Column  # predicted
    costs_s: _Column  # predicted delay of all answers together
    fit: _Column  # 1: it has a row and blocks, may hold answers, and keeps the target; or 0


class GenerateRequest(Message, frozen=True):
    """One sequence to generate. `deadline_ms` is the time left when it was sent.

    The last `num_generated` of `token_ids` belong to the answer: another worker generated them
    before it was lost, and this one resumes after them. `stop` counts from the first of them.
    """

    request_id: Name
    model: Name
    token_ids: Payload
    sampling: SamplingParams
    stop: StopConditions
    deadline_ms: Count
    cache_salt: Name = ""  # tenants with different salts never share blocks
    prefill_place: PrefillPlace | None = None  # the caller's choice, instead of the policy's
    num_generated: Count = 0
    grammar: Grammar | None = None  # None: any answer
    targets: Targets | None = None
    caller: Annotated[str, Meta(max_length=64)] = ""  # its API key's name, if it has one
    routed: Routed | None = None  # for `tandem explain`
    # PNG, JPEG, GIF or WebP, in the prompt's order. Of workers whose card has `supports_images`.
    images: Annotated[list[Payload], Meta(max_length=MAX_IMAGES)] = []


class TextRequest(Message, frozen=True):
    """A request for a worker that reads and writes text; the answer is JSON objects.

    `body` is the client's JSON; the answer is one whole response of that kind, or its chunks.
    """

    request_id: Name
    model: Name
    kind: Literal["chat", "completions"]
    body: Payload
    deadline_ms: Count


class VectorRequest(Message, frozen=True):
    """Texts to make vectors of, or pairs of texts to score. The answer is one `Vectors`."""

    request_id: Name
    model: Name
    kind: VectorKind
    inputs: Annotated[list[Payload], Meta(min_length=1, max_length=MAX_INPUTS)]  # token ids of each
    deadline_ms: Count
    dimensions: Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)] | None = None  # None: the model's
    # Of each pair, the place of its second text's first token, or the number of tokens.
    second_starts: Annotated[list[Count], Meta(max_length=MAX_INPUTS)] = []
    caller: Annotated[str, Meta(max_length=64)] = ""  # as in GenerateRequest


# ---- to a worker of the kit, from anyone ------------------------------------------------------


class Call(Message, frozen=True):
    """Any plain value, for an endpoint's handler; the answers are plain values in msgpack."""

    data: msgspec.Raw  # for `decoding.decode_value`


# ---- to a frontend, from a decode worker ------------------------------------------------------


class TokenDelta(Message, frozen=True, array_like=True, tag=False):
    """A sequence's new tokens of one engine step. Only the last delta has a finish_reason."""

    token_ids: Many[TokenId]
    finish_reason: FinishReason | None = None
    # One per token id; after `prompt_logprobs` the stop token has one too.
    logprobs: Many[TokenLogprobs] | None = None
    prefill: PrefillReport | None = None  # on the first delta only
    stop_token_id: TokenId | None = None  # the token that ended it, which is not in token_ids
    timeline_ms: Table[Amount] | None = None  # the whole request's, on its terminal delta
    prompt_logprobs: PromptLogprobs | None = None  # on the first delta only
    # Of a prompt with images, those that stand for the images included; on the first delta only.
    num_prompt_tokens: Count = 0


class Vectors(Message, frozen=True):
    """A vector per input, in their order, as little-endian float32. A score is a vector of one."""

    vectors: Annotated[list[Payload], Meta(max_length=MAX_INPUTS)]


class ModelFiles(Message, frozen=True):
    """The files of a model folder that a frontend needs: name |-> contents (no weights)."""

    files: Table[Payload]


def encode(message: msgspec.Struct) -> bytes:
    """Return the message in msgpack."""
    return _ENCODER.encode(message)


_ENCODER = msgspec.msgpack.Encoder()
