import itertools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.client.wire import BodyBuilder, SseParser, carries_output, decode_chunk

STREAM = (
    b": a comment\r\n\r\n"
    b'data: {"a":1}\n\n'
    b"event: message\nid: 7\ndata:{}\n\n"
    b"data: two\r\ndata: lines\r\n\r\n"
    b"data: [DONE]\n\n"
)
EVENTS = [b'{"a":1}', b"{}", b"two\nlines", b"[DONE]"]


def builder(**changes: object) -> BodyBuilder:
    return msgspec.structs.replace(BodyBuilder("tiny"), **changes)


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_events_do_not_depend_on_where_the_bytes_are_split(cuts: list[int]) -> None:
    parser = SseParser()
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:end] for start, end in itertools.pairwise(edges)]
    assert [event for piece in pieces for event in parser.feed(piece)] == EVENTS


@pytest.mark.parametrize(
    ("chunk", "is_output"),
    [
        ('{"choices":[{"text":"a"}]}', True),
        ('{"choices":[{"text":"a","finish_reason":"length"}]}', True),
        ('{"choices":[{"text":"","finish_reason":"length"}]}', False),
        ('{"choices":[{"text":""}]}', True),
        ('{"choices":[{"delta":{"role":"assistant","content":""}}]}', False),
        ('{"choices":[{"delta":{"role":"assistant","content":"a"}}]}', True),
        ('{"choices":[{"delta":{"content":"a"}}]}', True),
        ('{"choices":[{"delta":{"reasoning_content":"a"}}]}', True),
        ('{"choices":[{"delta":{},"finish_reason":"stop"}]}', False),
        ('{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}', False),
    ],
)
def test_only_chunks_that_stand_for_tokens_are_output_events(chunk: str, is_output: bool) -> None:
    assert carries_output(decode_chunk(chunk.encode())) is is_output


def test_a_completions_body_asks_for_usage_and_a_fixed_length() -> None:
    body = json.loads(builder().encode([1, 2, 3], 8))
    assert body == {
        "model": "tiny", "prompt": [1, 2, 3], "temperature": 0.0, "max_tokens": 8,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_a_chat_body_wraps_text_and_passes_messages() -> None:
    chat = builder(endpoint="chat", stream=False, ignore_eos=False)
    assert json.loads(chat.encode("hi", None))["messages"] == [{"role": "user", "content": "hi"}]
    messages = [{"role": "system", "content": "be brief"}]
    assert json.loads(chat.encode(messages, None))["messages"] == messages
    assert "max_tokens" not in json.loads(chat.encode("hi", None))


def test_chat_refuses_token_ids() -> None:
    with pytest.raises(ValueError, match="not token ids"):
        builder(endpoint="chat").encode([1, 2], 1)


def test_extra_fields_win_and_a_salt_is_passed() -> None:
    body = json.loads(builder(extra={"temperature": 0.7, "seed": 1}).encode("x", 1, "pepper"))
    assert (body["temperature"], body["seed"], body["cache_salt"]) == (0.7, 1, "pepper")
