"""Requests of every API to two models, each with one right answer, and what came back."""

import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.soak.load import SAMPLINGS

CANCELLED_SHARE = 0.1
REMOTE_SHARE = 0.3  # of the prompts
NEW_SHARE = 0.5  # of the prompts: no part of them is cached
CHUNKS_BEFORE_LEAVING = 12  # at most
HANG_S = 150.0  # longer than any wait for a worker to return
ROUNDING = 1e-3  # of a log probability
QUESTIONS = ("Hello!", "What is the capital of France?", "Tell me a story about a fox.")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
ENDS = ("response.completed", "message_stop")  # beside [DONE]


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A request whose answer is always the same."""

    name: str
    path: str
    body: dict[str, Any]


@dataclass(slots=True)
class Answer:
    """What came of a request. Times are time.monotonic()."""

    case: Case
    key: str
    started_at: float
    finished_at: float = 0.0
    status: int = 0
    text: str = ""  # calls of tools and the tokens of scores included
    end: str = ""  # the reason of the end, by the API's name
    score: float = 0.0  # sum of log probabilities
    error: str = ""
    has_ended: bool = False
    has_left: bool = False
    largest_gap_s: float = 0.0
    ids: dict[str, str] = field(default_factory=dict)

    def is_beginning_of(self, right: "Answer") -> bool:
        """Return True if the text so far is that of the answer."""
        return right.text.startswith(self.text)

    def is_like(self, right: "Answer") -> bool:
        """Return True if this is the answer, or its beginning where the client left."""
        if self.has_left:
            return self.is_beginning_of(right)
        is_near = abs(self.score - right.score) <= ROUNDING * (1 + len(right.text))
        return (self.text, self.end) == (right.text, right.end) and is_near

    def __str__(self) -> str:
        times = f"[{self.started_at:.2f}-{self.finished_at:.2f}]"
        what = self.error or f"{self.text!r} {self.end} {self.score:.3f}"
        return f"{self.case.name} {times} status {self.status} {self.ids}: {what}"


def cases(seed: int, tiny: str, sensitive: str) -> list[Case]:
    """Return the requests of a soak; `tiny` is the bundled model, `sensitive` a random one."""
    draw = random.Random(seed)
    greedy = {"temperature": 0, "stream": True}
    chat, found = "/v1/chat/completions", list[Case]()
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        asked: dict[str, Any] = {"model": tiny, "messages": messages, **greedy}
        found += [
            Case("chat", chat, {**asked, "max_tokens": 60}),
            Case("schema", chat, {**asked, "max_tokens": 60, "response_format": schema}),
            Case("messages", "/v1/messages", {**asked, "max_tokens": 40}),
            Case(
                "responses",
                "/v1/responses",
                {"model": tiny, "input": question, **greedy, "max_output_tokens": 40},
            ),
            Case(
                "scoring",
                "/v1/completions",
                {"model": tiny, "prompt": question * 4, "max_tokens": 0, "echo": True}
                | {"logprobs": 1},
            ),
        ]
    for city, streams in (("Paris", True), ("Rome", False)):
        messages = [{"role": "user", "content": f"What is the weather in {city}?"}]
        body = {"model": tiny, "messages": messages, "temperature": 0, "stream": streams}
        found.append(Case("tool", chat, {**body, "tools": [WEATHER], "reasoning_effort": "low"}))
    for model, lengths in ((sensitive, (5, 60, 300, 1200)), (tiny, (40, 200, 400))):
        for number, length in enumerate(lengths * 2):
            prompt = [draw.randrange(3, 300) for _ in range(length)]
            sampling = draw.choice(list(SAMPLINGS.values()))
            body = {"model": model, "prompt": prompt, "seed": number, "ignore_eos": True}
            body |= {"max_tokens": draw.randrange(20, 60), "stream": True, **sampling}
            found.append(Case(f"completion of {length}", "/v1/completions", body))
    pattern = {"guided_regex": "([a-f]{2,5}@(x|yy);){12}", "max_tokens": 200}
    body = {"model": sensitive, "prompt": "Mails:", "temperature": 1.2, "seed": 5, "stream": True}
    return [*found, Case("regex", "/v1/completions", {**body, **pattern})]


async def ask(
    http: aiohttp.ClientSession, url: str, case: Case, key: str, draw: random.Random | None = None
) -> Answer:
    """Ask, and return what comes of it within HANG_S. `draw`: the caller may be an odd one."""
    answer = Answer(case, key, time.monotonic())
    body, headers, leaves_after = case.body, {"authorization": f"Bearer {key}"}, -1
    if draw is not None:
        if case.path == "/v1/completions" and draw.random() < NEW_SHARE:
            body = {**body, "cache_salt": f"{draw.random()}"}
        if draw.random() < REMOTE_SHARE:
            headers["x-tandem-prefill"] = "remote"
        if case.body.get("stream") and draw.random() < CANCELLED_SHARE:
            leaves_after = draw.randrange(CHUNKS_BEFORE_LEAVING)
    timeout = aiohttp.ClientTimeout(total=HANG_S)
    try:
        async with http.post(url + case.path, json=body, headers=headers, timeout=timeout) as got:
            answer.status = got.status
            answer.ids = {
                name.removeprefix("x-tandem-"): got.headers[name]
                for name in ("x-tandem-request-id", "x-tandem-decode-instance")
                if name in got.headers
            }
            if got.content_type == "text/event-stream":
                await _read_stream(got, answer, leaves_after)
            else:
                _take(await got.json(), answer)
                answer.has_ended = True
    except (aiohttp.ClientError, OSError, ValueError) as error:
        answer.error = f"broken off: {type(error).__name__}: {error}"
    answer.finished_at = time.monotonic()
    if not (answer.has_ended or answer.has_left or answer.error):
        answer.error = "broken off: the stream ended without its last event"
    return answer


async def _read_stream(got: aiohttp.ClientResponse, answer: Answer, leaves_after: int) -> None:
    num_chunks, last_at = 0, 0.0
    async for line in got.content:
        if not line.startswith(b"data: "):
            continue
        if num_chunks == leaves_after:
            answer.has_left = True
            got.close()
            return
        now = time.monotonic()
        if num_chunks:
            answer.largest_gap_s = max(answer.largest_gap_s, now - last_at)
        num_chunks, last_at = num_chunks + 1, now
        if line.startswith(b"data: [DONE]"):
            answer.has_ended = True
        else:
            _take(json.loads(line[6:]), answer)


def _take(event: dict[str, Any], answer: Answer) -> None:
    """Add an event of a stream, or a whole body, of any API."""
    kind, response = event.get("type"), event.get("response") or {}
    if error := event.get("error") or response.get("error"):
        answer.error = f"{error.get('code') or error.get('type')}: {error.get('message')}"
    answer.has_ended |= kind in ENDS
    for choice in event.get("choices") or ():
        part = choice.get("delta") or choice.get("message") or {}
        calls = [call["function"] for call in part.get("tool_calls") or ()]
        texts = (part.get("reasoning_content"), part.get("content"), choice.get("text"))
        texts += tuple(each.get(name) for each in calls for name in ("name", "arguments"))
        answer.text += "".join(text or "" for text in texts)
        answer.end = choice.get("finish_reason") or answer.end
        scores = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        answer.score += sum(each or 0.0 for each in scores)
    delta = event.get("delta")
    if kind == "response.output_text.delta":
        answer.text += str(delta)
    elif isinstance(delta, dict):
        answer.text += delta.get("text") or ""
        answer.end = delta.get("stop_reason") or answer.end
    answer.end = response.get("status") or answer.end if kind in ENDS else answer.end
