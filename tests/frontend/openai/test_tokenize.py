"""/tokenize, /detokenize and /version over HTTP."""

from importlib.metadata import version
from typing import Any

from tests.frontend.frontend_stack import MODEL, Stack, byte_level_tokenizer, prompt_tokens

MESSAGES = [{"role": "user", "content": "Hi wörld"}]


async def test_a_chat_has_the_tokens_that_its_answer_would_be_given(stack: Stack) -> None:
    answer = await stack.http.post("/tokenize", json={"model": MODEL, "messages": MESSAGES})
    await stack.chat(messages=MESSAGES)
    expected = prompt_tokens(stack.worker.requests[0])
    assert answer.json() == {
        "count": len(expected),
        "max_model_len": 128,
        "tokens": expected,
        "token_strs": None,
    }


async def test_a_text_comes_back_from_its_tokens(stack: Stack) -> None:
    text = "<|im_start|>Hello wörld 😀<|im_end|>"
    body = {"prompt": text, "return_token_strs": True}  # the only model needs no name
    answer = (await stack.http.post("/tokenize", json=body)).json()
    tokenizer = byte_level_tokenizer()
    assert answer["tokens"] == tokenizer.encode(text).ids
    assert answer["token_strs"] == tokenizer.encode(text).tokens
    back = await stack.http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}
    assert not stack.worker.requests


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": 1}, "prompt"),
    ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": MESSAGES, "return_token_strs": 1}, "return_token_strs"),
    ("/tokenize", {"model": "none", "prompt": "x"}, "model"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ("/detokenize", {"tokens": [100_000]}, "tokens"),
    ("/detokenize", {"tokens": [1] * 5000}, "tokens"),  # more than the context
]


async def test_a_wrong_field_is_named(stack: Stack) -> None:
    for path, body, param in WRONG:
        response = await stack.http.post(path, json=body)
        assert response.status_code in (400, 404), body
        assert response.json()["error"]["param"] == param


async def test_without_a_model_alone_the_name_is_required() -> None:
    async with Stack(num_workers=0) as stack:
        response = await stack.http.post("/tokenize", json={"prompt": "x"})
        assert response.status_code == 400 and response.json()["error"]["param"] == "model"


async def test_the_version_is_that_of_the_package(stack: Stack) -> None:
    assert (await stack.http.get("/version")).json() == {"version": version("tandem-serve")}
