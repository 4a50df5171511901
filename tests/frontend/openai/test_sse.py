import pytest

from tandem.frontend.chat.responses import ResponseHead, usage
from tandem.frontend.http.events import DONE
from tandem.frontend.openai.sse import ChunkWriter, usage_event
from tandem.frontend.parsers.pieces import Content, Reasoning, ToolCallDelta
from tandem.runtime.wire.messages import FinishReason

CHAT = ResponseHead("chatcmpl-1", 17, "m", is_chat=True, with_usage=False)
TEXT = ResponseHead("cmpl-1", 17, 'a"b', is_chat=False, with_usage=True)


def test_the_bytes_of_a_chat_stream() -> None:
    writer = ChunkWriter(CHAT, 0)
    assert writer.role() == (
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":17,"model":"m",'
        b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
        b'"finish_reason":null}]}\n\n'
    )
    assert writer.piece(Content('a "b"\n😀')) == (
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":17,"model":"m",'
        b'"choices":[{"index":0,"delta":{"content":"a \\"b\\"\\n\xf0\x9f\x98\x80"},'
        b'"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert writer.finish("stop") == (
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":17,"model":"m",'
        b'"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}\n\n'
    )
    assert DONE == b"data: [DONE]\n\n"


def test_the_bytes_of_a_completion_stream_with_usage() -> None:
    writer = ChunkWriter(TEXT, 3)
    assert writer.role() == b""
    assert writer.piece(Content("x")) == (
        b'data: {"id":"cmpl-1","object":"text_completion","created":17,"model":"a\\"b",'
        b'"choices":[{"index":3,"text":"x","logprobs":null,"finish_reason":null}],'
        b'"usage":null}\n\n'
    )
    assert writer.finish("length") == (
        b'data: {"id":"cmpl-1","object":"text_completion","created":17,"model":"a\\"b",'
        b'"choices":[{"index":3,"text":"","logprobs":null,"finish_reason":"length"}],'
        b'"usage":null}\n\n'
    )
    assert usage_event(TEXT, usage(3, 4, 1)) == (
        b'data: {"id":"cmpl-1","object":"text_completion","created":17,"model":"a\\"b",'
        b'"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7,'
        b'"prompt_tokens_details":{"cached_tokens":1}}}\n\n'
    )


def test_reasoning_and_tool_calls_have_fields_of_their_own() -> None:
    writer = ChunkWriter(CHAT, 0)
    head = (
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":17,"model":"m",'
        b'"choices":[{"index":0,"delta":'
    )
    tail = b',"logprobs":null,"finish_reason":null}]}\n\n'
    assert writer.piece(Reasoning("a?")) == head + b'{"reasoning_content":"a?"}' + tail
    assert writer.piece(ToolCallDelta(0, '{"x"', "call_1", "look")) == (
        head + b'{"tool_calls":[{"index":0,"function":{"arguments":"{\\"x\\"","name":"look"},'
        b'"id":"call_1","type":"function"}]}' + tail
    )
    assert writer.piece(ToolCallDelta(0, ":1}")) == (
        head + b'{"tool_calls":[{"index":0,"function":{"arguments":":1}"}}]}' + tail
    )


@pytest.mark.parametrize(("ended", "shown"), [("stop", b"tool_calls"), ("length", b"length")])
def test_a_choice_with_tool_calls_finishes_by_them(ended: FinishReason, shown: bytes) -> None:
    writer = ChunkWriter(CHAT, 0)
    assert b'"finish_reason":"stop"' in writer.finish("stop")
    writer.piece(ToolCallDelta(0, "{}", "call_1", "look"))
    assert b'"finish_reason":"%b"' % shown in writer.finish(ended)
