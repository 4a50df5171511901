"""A frontend that asks for API keys, over HTTP."""

import asyncio
import hashlib
import itertools
import logging
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tandem.frontend.access import limits
from tandem.frontend.config import FrontendConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ConnectionLostError, InvalidRequestError
from tandem.runtime.plane.server import Responder
from tandem.runtime.wire.messages import GenerateRequest, TokenDelta, encode
from tests.frontend.frontend_stack import (
    MODEL,
    REPORT,
    Script,
    Stack,
    answer_with,
    one_token_then_wait,
    token_ids,
)
from tests.services import eventually

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
MESSAGES: Any = BODY["messages"]


def entry(name: str, *options: str) -> str:
    """An entry of the list; the key is the name with "key of"."""
    digest = hashlib.sha256(f"key of {name}".encode()).hexdigest()
    return " ".join([name, digest, *options])


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key of {name}"}


def keyed(*entries: str, **fields: Any) -> Stack:
    return Stack(config=FrontendConfig(port=0, api_keys=";".join(entries), **fields))


async def test_a_key_is_asked_for_everywhere_but_by_probes() -> None:
    async with keyed(entry("alice"), entry("ops", "metrics")) as stack:
        for method, path in [
            ("POST", "/v1/chat/completions"), ("POST", "/v1/responses"), ("GET", "/v1/models"),
            ("GET", "/v1/responses/x"), ("GET", "/metrics"),
            ("GET", "/metrics/targets"), ("GET", "/nothing"),
        ]:  # fmt: skip
            for headers in ({}, bearer("mallory"), {"authorization": "Basic eA=="}):
                refused = await stack.http.request(method, path, headers=headers, json=BODY)
                assert refused.status_code == 401, path
                assert refused.headers["www-authenticate"] == "Bearer"
                assert refused.json()["error"]["code"] == "invalid_api_key"
        assert not stack.worker.requests
        for path in ("/live", "/health"):
            assert (await stack.http.get(path)).status_code == 200
        for headers in (bearer("alice"), {"x-api-key": "key of alice"}):
            assert (await stack.http.get("/v1/models", headers=headers)).status_code == 200
            answered = await stack.http.post("/v1/chat/completions", json=BODY, headers=headers)
            assert answered.status_code == 200
        for path in ("/metrics", "/metrics/targets"):
            assert (await stack.http.get(path, headers=bearer("alice"))).status_code == 403
            assert (await stack.http.get(path, headers=bearer("ops"))).status_code == 200
        metrics = await stack.http.get("/metrics", headers=bearer("ops"))
        assert 'tandem_frontend_refused_keys_total{status="401"} 21.0' in metrics.text


async def test_a_worker_knows_the_name_of_the_key_whose_grammars_it_compiles() -> None:
    async with keyed(entry("alice")) as stack:
        await stack.http.post("/v1/chat/completions", json=BODY, headers=bearer("alice"))
        assert [each.caller for each in stack.worker.requests] == ["alice"]


async def test_the_official_clients_send_their_key() -> None:
    async with keyed(entry("alice")) as stack:
        async with openai.AsyncOpenAI(
            base_url=f"{stack.url}/v1", api_key="key of alice", max_retries=0
        ) as client:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="x").models.list()
        async with anthropic.AsyncAnthropic(
            base_url=stack.url, api_key="key of alice", max_retries=0
        ) as other:
            await other.messages.create(model=MODEL, max_tokens=9, messages=MESSAGES)
            with pytest.raises(anthropic.AuthenticationError):
                await other.with_options(api_key="x").messages.create(
                    model=MODEL, max_tokens=9, messages=MESSAGES
                )


async def test_logs_and_metrics_have_the_name_and_never_the_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with keyed(entry("alice")) as stack:
        await stack.http.post("/v1/chat/completions", json=BODY, headers=bearer("alice"))
        await stack.http.get("/v1/models", headers=bearer("mallory"))
        assert "/v1/chat/completions by alice: 200" in caplog.text
        assert "key of" not in caplog.text
        assert 'tandem_frontend_key_requests_total{key="alice",status="200"} 1.0' in stack.metrics()
        assert 'tandem_frontend_key_tokens_total{key="alice",kind="prompt"} 21.0' in stack.metrics()


async def test_metrics_have_a_bounded_number_of_names(stack: Stack) -> None:
    for number in range(300):
        stack.server.metrics.count_key(f"key{number}", 200, 1, 1)
    lines = [line for line in stack.metrics().splitlines() if "key_requests_total{" in line]
    assert len(lines) == 101
    assert any('key="other"' in line and line.endswith(" 200.0") for line in lines)


async def test_requests_beyond_the_limit_are_a_429_with_its_headers() -> None:
    async with keyed(entry("alice", "requests_per_minute=2"), entry("bob")) as stack:

        async def ask(name: str) -> Any:
            return await stack.http.post("/v1/chat/completions", json=BODY, headers=bearer(name))

        first = await ask("alice")
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        answers = await asyncio.gather(*[ask("alice") for _ in range(20)])
        assert sorted(answer.status_code for answer in answers) == [200] + [429] * 19
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert 25 <= int(refused.headers["retry-after"]) <= 30
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await ask("bob")).status_code == 200
        assert "x-ratelimit-limit-requests" not in (await ask("bob")).headers


async def test_tokens_are_reserved_while_an_answer_runs_and_settled_after_it() -> None:
    async with keyed(entry("alice", "tokens_per_minute=100")) as stack:
        stack.worker.script = one_token_then_wait
        limited = BODY | {"max_tokens": 50}  # with a prompt of 21

        async def ask(**fields: object) -> Any:
            return await stack.http.post(
                "/v1/chat/completions", json=limited | fields, headers=bearer("alice")
            )

        running = asyncio.create_task(ask())
        await eventually(lambda: len(stack.worker.requests) == 1)
        refused = await ask()
        assert refused.status_code == 429 and refused.headers["x-ratelimit-limit-tokens"] == "100"
        assert len(stack.worker.requests) == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await eventually(lambda: stack.server.handler._answering.num_taken == 0)
        stack.worker.script = answer_with("Hi")
        answered = await ask(max_tokens=20)
        used = answered.json()["usage"]["total_tokens"]
        assert answered.status_code == 200 and used < 41
        left = int((await ask(max_tokens=1)).headers["x-ratelimit-remaining-tokens"])
        assert 100 - 22 - used - 22 <= left <= 100 - 22 - used - 22 + 10  # it grows meanwhile


ENDS: dict[str, Exception | str] = {
    "stop": "stop",
    "length": "length",
    "a bug": RuntimeError("a bug"),
    "refused": InvalidRequestError("not this grammar"),
    "lost": ConnectionLostError("killed"),
    "left": "",  # by the client
}


def ending(num_tokens: int, end: Exception | str, sent: asyncio.Event) -> Script:
    """Sends as many tokens, one by one, and ends so."""

    async def script(_: GenerateRequest, context: RequestContext, responder: Responder) -> None:
        for number, token in enumerate(token_ids("abcdefgh")[:num_tokens]):
            report = None if number else REPORT
            responder.send(encode(TokenDelta([token], prefill=report)))
        if isinstance(end, Exception):
            raise end
        if end == "stop":
            last = TokenDelta([], finish_reason="stop", stop_token_id=0, prefill=REPORT)
            responder.send(encode(last))
        elif end == "length":
            responder.send(encode(TokenDelta([], finish_reason="length", prefill=REPORT)))
        else:
            sent.set()
            await context.cancelled()

    return script


@pytest.mark.parametrize("end", ENDS)
async def test_tokens_are_charged_however_a_request_ends(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_MINUTE_S", 1e12)  # nothing comes back by itself
    config = FrontendConfig(
        port=0, api_keys=entry("alice", "tokens_per_minute=1000000"), migration_limit=0, exclude_s=0
    )
    async with Stack(config=config) as stack:
        (client,) = stack.server.access._clients.values()
        assert client.tokens is not None
        for stream, limit, num_tokens, path in itertools.product(
            (True, False),
            ({}, {"max_tokens": 8}),
            (0, 1, 5),
            ("/v1/chat/completions", "/v1/messages"),
        ):
            if path == "/v1/messages" and not limit:
                continue  # it always has one
            sent = asyncio.Event()
            stack.worker.script = ending(num_tokens, ENDS[end], sent)
            before = client.tokens.level
            body = BODY | limit | {"stream": stream}
            asking = asyncio.create_task(stack.http.post(path, json=body, headers=bearer("alice")))
            if end == "left":
                await sent.wait()
                asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await eventually(lambda: not stack.server.handler._contexts)
            charged = before - client.tokens.level
            case = (stream, limit, num_tokens, path)
            num_paid = 21 + num_tokens + (end == "stop")  # the token that stops is one, too
            is_ours = end in ("a bug", "lost") and num_tokens == 0
            if end == "left" and num_tokens:  # the client left before or after they came
                assert 21 <= charged <= 21 + num_tokens, case
            else:
                assert charged == pytest.approx(0 if is_ours else num_paid, abs=0.01), case


async def test_a_caller_who_always_leaves_before_the_first_token_is_refused_in_the_end() -> None:
    async with keyed(entry("alice", "tokens_per_minute=100")) as stack:
        stack.worker.script = ending(0, "", sent := asyncio.Event())
        for _ in range(4):  # prompts of 21
            sent.clear()
            asking = asyncio.create_task(
                stack.http.post("/v1/chat/completions", json=BODY, headers=bearer("alice"))
            )
            await sent.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await eventually(lambda: not stack.server.handler._contexts)
        limited = BODY | {"max_tokens": 30}
        refused = await stack.http.post(
            "/v1/chat/completions", json=limited, headers=bearer("alice")
        )
        assert refused.status_code == 429
        assert int(refused.headers["x-ratelimit-remaining-tokens"]) < 50


async def test_a_stored_response_is_the_keys_own() -> None:
    async with keyed(entry("alice"), entry("bob")) as stack:
        body = {"model": MODEL, "input": "Hi"}
        made = await stack.http.post("/v1/responses", json=body, headers=bearer("alice"))
        path = f"/v1/responses/{made.json()['id']}"
        assert (await stack.http.get(path, headers=bearer("alice"))).status_code == 200
        assert (await stack.http.get(path, headers=bearer("bob"))).status_code == 404
        more = body | {"previous_response_id": made.json()["id"]}
        for name, status in (("bob", 404), ("alice", 200)):
            answer = await stack.http.post("/v1/responses", json=more, headers=bearer(name))
            assert answer.status_code == status


async def test_a_file_of_keys_is_read_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tandem.runtime.process.watched_files._POLL_S", 0.01)
    file = tmp_path / "keys"
    file.write_text(entry("alice", "requests_per_minute=2") + "\n")
    async with Stack(config=FrontendConfig(port=0, api_keys_file=str(file))) as stack:

        async def status(name: str) -> int:
            return (await stack.http.get("/v1/models", headers=bearer(name))).status_code

        async def becomes(name: str, wanted: int) -> None:
            while await status(name) != wanted:
                await asyncio.sleep(0.01)

        assert (await status("alice"), await status("bob")) == (200, 401)
        await stack.http.post("/v1/chat/completions", json=BODY, headers=bearer("alice"))
        file.write_text(entry("alice", "requests_per_minute=2") + "\n" + entry("bob"))
        await becomes("bob", 200)
        again = await stack.http.post("/v1/chat/completions", json=BODY, headers=bearer("alice"))
        assert again.headers["x-ratelimit-remaining-requests"] == "0"
        file.write_text("nonsense")
        await eventually(lambda: "is not in force" in caplog.text)
        assert await status("bob") == 200
        file.write_text(entry("bob"))
        await becomes("alice", 401)


async def test_one_key_leaves_others_room_for_their_requests() -> None:
    async with keyed(entry("alice"), entry("bob"), max_inflight_requests=4) as stack:
        stack.worker.script = one_token_then_wait
        path = "/v1/chat/completions"
        running = [
            asyncio.create_task(stack.http.post(path, json=BODY, headers=bearer("alice")))
            for _ in range(2)
        ]
        await eventually(lambda: len(stack.worker.requests) == 2)
        refused = await stack.http.post(path, json=BODY, headers=bearer("alice"))
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "too_many_requests"
        stack.worker.script = None
        assert (await stack.http.post(path, json=BODY, headers=bearer("bob"))).status_code == 200
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await eventually(lambda: stack.server.handler._answering.num_taken == 0)
