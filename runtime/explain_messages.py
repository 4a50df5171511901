"""The messages of `tandem explain`: the places that were considered for a request's prompt."""

from typing import Annotated

import msgspec

from tandem.runtime.messages import Message, PrefillPlace

EXPLAIN_ENDPOINT = "explain"
MAX_REQUEST_ID_CHARS = 512
MAX_REMEMBERED = 1024  # requests that have ended, by each decode worker


class ExplainRequest(Message, frozen=True):
    """A question to a decode worker about a request; the answer is a PromptExplanations."""

    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARS)]


class RoutedWorker(Message, frozen=True, tag=False):
    """The frontend's prediction for a prompt at one decode worker."""

    instance_id: str
    first_token_ms: float
    cost_ms: float  # predicted delay of all answers together
    fits: bool  # it has a row and blocks, may hold answers, and keeps the target


class ConsideredPlace(Message, frozen=True, tag=False):
    """The prediction for a prompt at one worker."""

    place: PrefillPlace
    instance_id: str
    wait_ms: float  # until its first step
    compute_ms: float  # from there to its first token
    transfer_ms: float  # until its KV is proven at the decode worker
    first_token_ms: float
    cost_ms: float  # predicted delay of all answers together
    num_missed: int  # targets


class PromptExplanation(Message, frozen=True, tag=False):
    """One sequence of a request at one decode worker: the decision, and the course it took."""

    request_id: str  # of several sequences of one request each has its number after it
    decode_instance: str
    outcome: str  # running | finished | the code of an error
    num_prompt_tokens: int
    num_cached_tokens: int  # of these, here or at the prefill worker
    routed: list[RoutedWorker]  # decode workers, as the frontend compared them
    considered: list[ConsideredPlace]  # places of the prompt; empty: none was predicted
    place: PrefillPlace
    cause: str
    reason: str
    last_place: PrefillPlace  # another one where a remote prefill was given up
    last_reason: str
    prefill_instance: str = ""  # that computed the prompt remotely
    ttft_target_ms: float | None = None  # in force
    itl_target_ms: float | None = None
    predicted_ms: float = 0.0  # to the first token, from receiving the request; 0: not known
    timeline_ms: dict[str, float] = {}  # stage |-> ms since the worker received the request


class PromptExplanations(Message, frozen=True):
    """The answer of a decode worker; empty where it remembers no such request."""

    found: list[PromptExplanation]
