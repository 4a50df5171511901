"""Answers that are cut in the middle, and all that a client has of them in the end."""

import asyncio
from collections import Counter
from typing import Any

import msgspec

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import TandemError
from tandem.runtime.plane.server import Responder
from tandem.runtime.wire.messages import GenerateRequest, TokenDelta, TokenLogprobs, encode
from tests.frontend.frontend_stack import (
    ANSWER,
    MODEL,
    REPORT,
    FakeWorker,
    Script,
    Stack,
    events_of,
    token_ids,
)

TEXT_AND_LOGPROBS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 64}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2},
    ),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 64, "logprobs": 2, "echo": False}),
]


def logprobs_at(position: int) -> TokenLogprobs:
    return TokenLogprobs(-0.01 * position, [(position % 250, -0.01 * position), (7, -5.0)])


def telling(text: str) -> Script:
    """Answers token by token, with what each position's logprobs are."""

    async def script(
        request: GenerateRequest, _context: RequestContext, responder: Responder
    ) -> None:
        ids = token_ids(text)[: request.stop.max_tokens]
        report = REPORT
        for position in range(request.num_generated, len(ids)):
            logprobs = None
            if request.sampling.logprobs is not None:
                logprobs = [logprobs_at(position)]
            delta = TokenDelta([ids[position]], logprobs=logprobs, prefill=report)
            responder.send(encode(delta))
            report = None
        is_cut = len(ids) < len(token_ids(text))
        reason, stop_token = ("length", None) if is_cut else ("stop", 0)
        responder.send(encode(TokenDelta([], reason, None, report, stop_token)))

    return script


class Cut:
    """Fails a request's first worker after `num_tokens` tokens; the next one goes on.

    `error`: what the worker raises in the same frame as its last token; None: its connections are
    cut, and if it `vanishes`, nobody listens at its address any more.
    """

    def __init__(
        self,
        stack: Stack,
        num_tokens: int,
        error: TandemError | None,
        text: str = ANSWER,
        *,
        vanishes: bool = False,
    ) -> None:
        self.vanishes = vanishes
        self.num_tokens = num_tokens
        self.error = error
        self.whole = telling(text)
        self.num_cuts: Counter[str] = Counter()
        self.times = 1
        for worker in stack.workers:
            worker.requests.clear()
            worker.script = self.script_of(worker)

    def script_of(self, worker: FakeWorker) -> Script:
        async def script(
            request: GenerateRequest, context: RequestContext, responder: Responder
        ) -> None:
            if self.num_cuts[request.request_id] >= self.times:
                await self.whole(request, context, responder)
                return
            self.num_cuts[request.request_id] += 1
            until = request.num_generated + self.num_tokens
            limited = msgspec.structs.replace(request.stop, max_tokens=until)
            begun = _WithoutEnd(responder)
            await self.whole(msgspec.structs.replace(request, stop=limited), context, begun)
            if self.error is not None:
                raise self.error
            for _ in range(3):
                await asyncio.sleep(0)  # what it said is on its way
            if self.vanishes:
                worker.vanish()
            worker.cut()

        return script


class _WithoutEnd:
    """Passes on what a script sends, but for the news that it is over."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def send(self, payload: bytes) -> None:
        if msgspec.msgpack.decode(payload, type=TokenDelta).finish_reason is None:
            self._responder.send(payload)


async def ask(stack: Stack, path: str, body: dict[str, Any], **fields: object) -> dict[str, Any]:
    """The whole answer that a client has, streamed or not: texts, logprobs, reasons, usage."""
    whole = {"model": MODEL, **body, **fields}
    if whole.get("stream"):
        whole["stream_options"] = {"include_usage": True}
    response = await stack.http.post(path, json=whole)
    assert response.status_code == 200, response.text
    if not whole.get("stream"):
        answer = response.json()
        choices = {choice["index"]: _content(choice) for choice in answer["choices"]}
        return {"choices": choices, "usage": answer["usage"]}
    choices: dict[int, dict[str, Any]] = {}
    events = events_of(response)
    for event in events[:-1]:
        for choice in event["choices"]:
            _add(choices.setdefault(choice["index"], {}), _content(choice))
    return {"choices": choices, "usage": events[-1]["usage"]}


def _content(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or choice.get("delta") or choice
    text = message.get("content", "") if message is not choice else choice.get("text", "")
    return {
        "text": text or "",
        "roles": [message["role"]] if "role" in message else [],
        "logprobs": choice["logprobs"],
        "reason": choice["finish_reason"],
    }


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    whole["text"] = whole.get("text", "") + part["text"]
    whole["roles"] = whole.get("roles", []) + part["roles"]
    whole["reason"] = whole.get("reason") or part["reason"]
    known, new = whole.setdefault("logprobs", None), part["logprobs"]
    if known is None:
        whole["logprobs"] = new
    elif new is not None:
        for key, values in new.items():
            known[key] = None if values is None else known[key] + values
