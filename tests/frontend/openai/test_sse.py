import json

from tandem.frontend.openai.responses import ChatLogprobs, TokenLogprob, usage
from tandem.frontend.openai.sse import DONE, ChunkWriter, StreamHead, error_event

CHAT = StreamHead("chatcmpl-1", 17, "m", is_chat=True, with_usage=False)
TEXT = StreamHead("cmpl-1", 17, 'a"b', is_chat=False, with_usage=True)


def test_the_bytes_of_a_chat_stream() -> None:
    writer = ChunkWriter(CHAT, 0)
    assert writer.role() == (
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":17,"model":"m",'
        b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
        b'"finish_reason":null}]}\n\n'
    )
    assert writer.text('a "b"\n😀') == (
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
    assert writer.text("x") == (
        b'data: {"id":"cmpl-1","object":"text_completion","created":17,"model":"a\\"b",'
        b'"choices":[{"index":3,"text":"x","logprobs":null,"finish_reason":null}],'
        b'"usage":null}\n\n'
    )
    assert writer.finish("length") == (
        b'data: {"id":"cmpl-1","object":"text_completion","created":17,"model":"a\\"b",'
        b'"choices":[{"index":3,"text":"","logprobs":null,"finish_reason":"length"}],'
        b'"usage":null}\n\n'
    )
    assert TEXT.usage_event(usage(3, 4, 1)) == (
        b'data: {"id":"cmpl-1","object":"text_completion","created":17,"model":"a\\"b",'
        b'"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7,'
        b'"prompt_tokens_details":{"cached_tokens":1}}}\n\n'
    )


def test_a_chunk_with_logprobs_is_json_of_the_same_shape() -> None:
    logprobs = ChatLogprobs([TokenLogprob("x", -0.5, [120], [])])
    event = ChunkWriter(CHAT, 0).text_with_logprobs("x", logprobs)
    assert event.startswith(b"data: ") and event.endswith(b"\n\n")
    (choice,) = json.loads(event[6:])["choices"]
    assert choice["delta"] == {"content": "x"}
    assert choice["logprobs"]["content"][0] == {
        "token": "x",
        "logprob": -0.5,
        "bytes": [120],
        "top_logprobs": [],
    }


def test_an_error_is_one_event() -> None:
    assert error_event(b'{"error":{}}') == b'data: {"error":{}}\n\n'
