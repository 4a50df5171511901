"""From a checked body to the sequences that decode workers generate."""

import hashlib
import random
import re
from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import replace

from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.catalog.catalog import ServedModel, TokenModel
from tandem.frontend.chat.requests import ChatRequest, CompletionRequest
from tandem.frontend.chat.responses import ResponseHead, new_head
from tandem.frontend.config import FrontendConfig
from tandem.frontend.generation.answer_format import AnswerFormat, answer_format
from tandem.frontend.generation.prompts import Prompt, PromptMaker, check_token_ids
from tandem.frontend.http.api import Call
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.block_hash import block_hashes
from tandem.runtime.wire.messages import (
    GenerateRequest,
    PrefillPlace,
    SamplingParams,
    TargetMs,
    Targets,
    pack_tokens,
)
from tandem.runtime.wire.request_bounds import check_num_prompt_logprobs
from tandem.runtime.wire.sampling_defaults import NO_DEFAULTS, SamplingDefaults

T = TypeVar("T")
_PREFILL_HEADER = b"x-tandem-prefill"
_PLACEMENTS: dict[bytes, Literal["local", "remote"]] = {b"local": "local", b"remote": "remote"}
_TIMELINE_HEADER = b"x-tandem-timeline"  # asks for the timeline: other servers ignore the header
_MAX_HASHED_BLOCKS = 2048  # of a prompt; hashing more would hold up the streams for milliseconds
_IMAGE = re.compile(r"images\[(\d{1,3})\]")
_SWITCH = {b"true": True, b"false": False}
_TTFT_HEADER = b"x-tandem-ttft-target-ms"
_ITL_HEADER = b"x-tandem-itl-target-ms"


class Choice(msgspec.Struct, frozen=True):
    """One sequence to generate; `index` is its position in the response."""

    index: int
    prompt: Prompt
    request: GenerateRequest


class _Wishes(msgspec.Struct, frozen=True):
    """The caller, and what it asks for beside its body."""

    placement: PrefillPlace | None
    targets: Targets | None
    caller: str  # the name of its API key, if it has one


class Plan(msgspec.Struct, frozen=True):
    """A request that is ready to generate: each prompt `n` times, prompt by prompt."""

    model: TokenModel
    body: ChatRequest | CompletionRequest
    prompts: list[Prompt]
    choices: list[Choice]
    format: AnswerFormat
    context: RequestContext
    head: ResponseHead
    wants_timeline: bool
    num_prompt_tokens: int  # of all prompts; choices of one prompt share it

    def translated(self, error: InvalidRequestError) -> InvalidRequestError:
        """Return a worker's error about an image or the grammar with the field of the client."""
        found = _IMAGE.fullmatch(error.param or "")
        images = self.body.images if isinstance(self.body, ChatRequest) else []
        if found is None or int(found[1]) >= len(images):
            return self.format.translated(error)
        return invalid_field(images[int(found[1])].field, f"cannot be read: {error.message}")


def most_generated(plan: Plan) -> int:
    """Return the most tokens of the answers; 0 where the body does not limit them."""
    if plan.body.token_limit is None:
        return 0
    return sum([choice.request.stop.max_tokens for choice in plan.choices])


async def new_plan(
    body: ChatRequest | CompletionRequest,
    served: ServedModel,
    prompt_maker: PromptMaker,
    call: Call,
) -> Plan:
    """Tokenize a body and fit it to its model. Raises InvalidRequestError naming the field."""
    model, context, headers = of_tokens(served), call.context, call.exchange.headers
    placement = _one_of(headers, _PREFILL_HEADER, _PLACEMENTS)
    wants_timeline = _one_of(headers, _TIMELINE_HEADER, _SWITCH) or False
    wishes = _Wishes(placement, targets_in(headers), call.owner)
    clamps = prompt_maker.config.clamp_max_tokens or call.clamps_max_tokens
    prompts = await prompt_maker.prompts(body, model, clamps=clamps)
    is_chat = isinstance(body, ChatRequest)
    head = new_head(
        context.id,
        model.card.name,
        is_chat,
        body.include_usage,
        calls_functions=isinstance(body, ChatRequest) and body.functions is not None,
    )
    config, first = prompt_maker.config, prompts[0].token_ids
    format = answer_format(body, model, config, first, call.ignored)
    sampling = _sampling(body, model, default_sampling(model, config))
    choices = _choices(body, model, prompts, sampling, format, context, wishes)
    num_tokens = sum([len(prompt.token_ids) for prompt in prompts])
    return Plan(model, body, prompts, choices, format, context, head, wants_timeline, num_tokens)


def prefix_hashes(token_ids: list[int], block_size: int, salt: str) -> list[bytes]:
    """Return the hashes of the first blocks of a prompt, as the router looks them up."""
    hashed = token_ids[: _MAX_HASHED_BLOCKS * block_size]
    return block_hashes(hashed, block_size, salt=salt)


def of_tokens(model: ServedModel) -> TokenModel:
    """Return a model whose text is the frontend's. Raises InvalidRequestError for another one."""
    if not isinstance(model, TokenModel):
        raise InvalidRequestError(
            f"the frontend has no tokenizer of model {model.card.name!r}", param="model"
        )
    return model


def _choices(
    body: ChatRequest | CompletionRequest,
    model: TokenModel,
    prompts: list[Prompt],
    sampling: SamplingParams,
    format: AnswerFormat,
    context: RequestContext,
    wishes: _Wishes,
) -> list[Choice]:
    n = body.n or 1
    if sampling.prompt_logprobs:
        param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        num_tokens = n * sum(len(prompt.token_ids) for prompt in prompts)
        check_num_prompt_logprobs(num_tokens, sampling.logprobs or 0, param)
    is_single = len(prompts) * n == 1
    grammar = None if format.constraint is None else format.constraint.grammar
    images = [each.data for each in body.images] if isinstance(body, ChatRequest) else []
    if images and not model.card.supports_images:  # any more: the body was read before
        raise InvalidRequestError(
            f"the workers of model {model.card.name!r} see no images", param=body.origins.prompt
        )
    choices: list[Choice] = []
    for prompt in prompts:
        token_ids = pack_tokens(prompt.token_ids)
        for ordinal in range(n):
            index = len(choices)
            # A given seed counts for each prompt: a batch answers like its prompts one by one.
            seed = derived_seed(sampling.seed, index if body.seed is None else ordinal)
            request = GenerateRequest(
                request_id=context.id if is_single else f"{context.id}-{index}",
                model=model.card.name,
                token_ids=token_ids,
                sampling=sampling if index == 0 else replace(sampling, seed=seed),
                stop=prompt.stop,
                deadline_ms=0,  # set when it is sent
                cache_salt=body.cache_salt or "",
                prefill_place=wishes.placement,
                grammar=grammar,
                targets=wishes.targets,
                caller=wishes.caller,
                images=images,
            )
            choices.append(Choice(index, prompt, request))
    return choices


def default_sampling(model: ServedModel, config: FrontendConfig) -> SamplingDefaults:
    """Return the sampling of requests to `model` that name none."""
    if isinstance(model, TokenModel) and config.generation_config == "auto":
        return model.text.sampling
    return NO_DEFAULTS


def _sampling(
    body: ChatRequest | CompletionRequest, model: TokenModel, defaults: SamplingDefaults
) -> SamplingParams:
    biases = body.token_biases
    check_token_ids(biases, model, "logit_bias")
    if body.allowed_token_ids or body.bad_words:
        _check_rules(body, model)
    seed = random.getrandbits(63) if body.seed is None else body.seed % 2**64
    top_p = _first(body.top_p, defaults.top_p, 1.0)
    is_greedy = top_p == 0  # of a nucleus without mass, the likeliest token is left
    top_k = defaults.top_k if body.top_k is None else body.top_k
    return SamplingParams(
        temperature=0.0 if is_greedy else _first(body.temperature, defaults.temperature, 1.0),
        top_p=1.0 if is_greedy else top_p,
        top_k=max(0, top_k or 0),
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=biases,
        seed=seed,
        logprobs=_num_logprobs(body),
        prompt_logprobs=body.scores_prompt,
        allowed_token_ids=body.allowed_token_ids or [],
        bad_words=_bad_words(body.bad_words, model) if body.bad_words else [],
    )


def _check_rules(body: ChatRequest | CompletionRequest, model: TokenModel) -> None:
    for name, value in (
        ("allowed_token_ids", body.allowed_token_ids),
        ("bad_words", body.bad_words),
    ):
        if value and not model.card.supports_token_rules:
            raise InvalidRequestError(
                f"`{name}`: the workers of model {model.card.name!r} do not support it", param=name
            )
    check_token_ids(body.allowed_token_ids or [], model, "allowed_token_ids")


def _bad_words(words: list[str], model: TokenModel) -> list[list[int]]:
    """Return the tokens of words, at the beginning of a text and after a space."""
    texts = [text for word in words for text in (word, f" {word.lstrip()}")]
    found = {tuple(model.text.encode(text, is_chat=True)): None for text in texts}
    return [list(token_ids) for token_ids in found if token_ids]


def _num_logprobs(body: ChatRequest | CompletionRequest) -> int | None:
    """Return the most log probabilities that the prompt or the answer lists; None for none."""
    if body.prompt_logprobs is None:
        return body.num_logprobs
    return max(body.prompt_logprobs, body.num_logprobs or 0)


def _first(own: float | None, of_model: float | None, default: float) -> float:
    if own is not None:
        return own
    return default if of_model is None else of_model


def derived_seed(seed: int, ordinal: int) -> int:
    """Return the u64 seed of choice `ordinal`. Choice 0 has the seed itself."""
    if ordinal == 0:
        return seed
    data = seed.to_bytes(8, "little") + ordinal.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _one_of(headers: Mapping[bytes, bytes], header: bytes, values: Mapping[bytes, T]) -> T | None:
    """Return the value that a header names; None without the header."""
    given = headers.get(header)
    if given is None:
        return None
    value = values.get(given.strip().lower())
    if value is None:
        name, names = header.decode(), " or ".join(map(bytes.decode, values))
        raise InvalidRequestError(f"header `{name}` must be {names}", param=name)
    return value


def targets_in(headers: Mapping[bytes, bytes]) -> Targets | None:
    """Return the latencies that the headers of a request ask for; None without them."""
    if _TTFT_HEADER not in headers and _ITL_HEADER not in headers:
        return None
    return Targets(_target_ms(headers, _TTFT_HEADER), _target_ms(headers, _ITL_HEADER))


def _target_ms(headers: Mapping[bytes, bytes], header: bytes) -> float | None:
    value = headers.get(header)
    if value is None:
        return None
    try:
        return msgspec.convert(value.decode("latin-1"), TargetMs, strict=False)
    except msgspec.ValidationError:
        name = header.decode()
        message = f"header `{name}` must be a number of milliseconds above 0, up to an hour"
        raise InvalidRequestError(message, param=name) from None
