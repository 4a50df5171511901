"""The messages of `tandem explain`: the places that were considered for a request's prompt."""

from typing import Annotated

from msgspec import Meta

from tandem.runtime.wire.bounds import Count, Few, Message, Name, Real, Table, Text
from tandem.runtime.wire.messages import PrefillPlace

EXPLAIN_ENDPOINT = "explain"
MAX_REQUEST_ID_CHARS = 512
MAX_REMEMBERED = 1024  # requests that have ended, by each decode worker


class ExplainRequest(Message, frozen=True):
    """A question to a decode worker about a request; the answer is a PromptExplanations."""

    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARS)]


class RoutedWorker(Message, frozen=True, tag=False):
    """The frontend's prediction for a prompt at one decode worker."""

    instance_id: Name
    first_token_ms: Real
    cost_ms: Real  # predicted delay of all answers together
    fits: bool  # it has a row and blocks, may hold answers, and keeps the target


class ConsideredPlace(Message, frozen=True, tag=False):
    """The prediction for a prompt at one worker."""

    place: PrefillPlace
    instance_id: Name
    wait_ms: Real  # until its first step
    compute_ms: Real  # from there to its first token
    transfer_ms: Real  # until its KV is proven at the decode worker
    first_token_ms: Real
    cost_ms: Real  # predicted delay of all answers together
    num_missed: Count  # targets


class PromptExplanation(Message, frozen=True, tag=False):
    """One sequence of a request at one decode worker: the decision, and the course it took."""

    request_id: Name  # of several sequences of one request each has its number after it
    decode_instance: Name
    outcome: Name  # running | finished | the code of an error
    num_prompt_tokens: Count
    num_cached_tokens: Count  # of these, here or at the prefill worker
    routed: Few[RoutedWorker]  # decode workers, as the frontend compared them
    considered: Few[ConsideredPlace]  # places of the prompt; empty: none was predicted
    place: PrefillPlace
    cause: Name
    reason: Text
    last_place: PrefillPlace  # another one where a remote prefill was given up
    last_reason: Text
    prefill_instance: Name = ""  # that computed the prompt remotely
    ttft_target_ms: Real | None = None  # in force
    itl_target_ms: Real | None = None
    predicted_ms: Real = 0.0  # to the first token, from receiving the request; 0: not known
    timeline_ms: Table[Real] = {}  # stage |-> ms since the worker received the request


class PromptExplanations(Message, frozen=True):
    """The answer of a decode worker; empty where it remembers no such request."""

    found: Few[PromptExplanation]
