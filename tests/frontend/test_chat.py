from tests.frontend.frontend_stack import ANSWER, MODEL, Stack, events_of, prompt_tokens, token_ids

PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


async def test_a_chat_is_answered_with_text_usage_and_where_it_was_prefilled(stack: Stack) -> None:
    response = await stack.chat()
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == "chat.completion" and body["model"] == MODEL
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"]["content"] == ANSWER and choice["finish_reason"] == "stop"
    num_tokens = len(token_ids(ANSWER)) + 1  # and the stop token
    assert body["usage"] == {
        "prompt_tokens": len(token_ids(PROMPT)),
        "completion_tokens": num_tokens,
        "total_tokens": len(token_ids(PROMPT)) + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert response.headers["x-tandem-prefill"] == "local"
    assert response.headers["x-tandem-prefill-reason"].startswith("uncached 3 <=")
    assert response.headers["x-tandem-decode-instance"] == stack.worker.instance_id
    (request,) = stack.worker.requests
    assert request.request_id == response.headers["x-tandem-request-id"]
    assert prompt_tokens(request) == token_ids(PROMPT)


async def test_a_streamed_chat_has_the_same_text_in_events(stack: Stack) -> None:
    response = await stack.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-tandem-prefill"] == "local"
    events = events_of(response)
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] > 5
    assert all(event["usage"] is None for event in events[:-1])
