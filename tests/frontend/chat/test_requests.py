"""Bodies of all kinds: each is a request or an error of the caller, and nothing else."""

import json
import math
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.frontend.chat.requests import ChatRequest, CompletionRequest, parse
from tandem.frontend.config import FrontendConfig
from tandem.runtime.errors import InvalidRequestError

CONFIG = FrontendConfig()
NUMBERS = (
    st.integers()
    | st.floats()
    | st.sampled_from(
        [0, -1, 1e-40, 5e-324, 1e308, 2**31, 2**63, 2**64, 10**400, math.inf, math.nan]
    )
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "unknown"})
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6)
TEXT = {"model": "m", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(BODIES, st.booleans(), st.booleans())
def test_any_body_is_a_request_or_an_error_of_the_caller(
    body: dict[str, Any], is_chat: bool, is_complete: bool
) -> None:
    kind = ChatRequest if is_chat else CompletionRequest
    required = {"model", "messages" if is_chat else "prompt"}
    given_fields = {name: TEXT[name] for name in required} | body if is_complete else body
    try:
        request = parse(kind, json.dumps(given_fields).encode(), CONFIG)
        biases = request.token_biases
        if isinstance(request, ChatRequest):
            assert all(type(each["content"]) is str for each in request.conversation())
        else:
            assert request.prompts(CONFIG)
    except InvalidRequestError:
        return
    numbers = [request.temperature, request.top_p, request.min_p, *biases.values()]
    assert all(number is None or math.isfinite(number) for number in numbers)
    assert request.repetition_penalty is None or request.repetition_penalty >= 0.01
    for integer in (request.top_k, request.max_tokens, request.min_tokens, request.num_logprobs):
        assert integer is None or -1 <= integer < 2**31
