"""The requests of a soak: what is asked, and what came back."""

import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

Sampling = Literal["greedy", "seeded", "penalties"]
SAMPLINGS: dict[Sampling, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95},
    "penalties": {
        "temperature": 0.7,
        "top_k": 40,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
    },
}
HEAD_TOKENS = (
    0,
    0,
    48,
    48,
    160,
    160,
    400,
    900,
    1800,
)  # of a shared document, before a request's own words
NUM_DOCUMENTS = 5
SALTS_PER_ERA = 6  # prompts of one salt share their cached heads
ERA = 150  # requests; then the salts are new, and nothing is cached
CANCELLED_SHARE = 0.08
HANG_S = 30.0
ROUNDING = 1e-3  # of logprobs; float32 on different batches differs by about 1e-5


@dataclass(frozen=True, slots=True)
class Question:
    """Something to ask, whose answer is always the same."""

    number: int
    token_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model, "prompt": list(self.token_ids), "max_tokens": self.max_tokens,
            "ignore_eos": True, "seed": self.number, "stream": True,
            "stream_options": {"include_usage": True}, **SAMPLINGS[self.sampling],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Order:
    """One request of a soak."""

    index: int
    question: Question
    cache_salt: str
    place: Literal["local", "remote"] | None
    wants_margins: bool = False
    leaves_after: int | None = None  # chunks; the client hangs up then
    patience_s: float | None = None  # or then

    def headers(self) -> dict[str, str]:
        return {} if self.place is None else {"x-tandem-prefill": self.place}


@dataclass(slots=True)
class Outcome:
    """What came of an order. Times are time.monotonic()."""

    order: Order
    started_at: float
    finished_at: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    num_tokens: int | None = None
    finish_reason: str | None = None
    error: str = ""  # a typed one, as the server told it
    broken: str = ""  # the connection ended in no agreed way
    has_left: bool = False
    has_hung: bool = False
    smallest_margin: float = math.inf  # between a token and the next best, in logprobs
    first_event_at: float | None = None
    largest_gap_s: float = 0.0  # between two events of the stream
    gap_ended_at: float = 0.0

    @property
    def request_id(self) -> str:
        return self.headers.get("x-tandem-request-id", "")

    @property
    def decode_instance(self) -> str:
        return self.headers.get("x-tandem-decode-instance", "")

    @property
    def place(self) -> str:
        return self.headers.get("x-tandem-prefill", "")


def questions(seed: int, count: int, vocab_size: int = 300) -> list[Question]:
    """Prompts of many lengths, several of which begin alike."""
    draw = random.Random(seed)
    documents = [
        [draw.randrange(3, vocab_size) for _ in range(max(HEAD_TOKENS))]
        for _ in range(NUM_DOCUMENTS)
    ]
    asked = []
    for number in range(count):
        head = draw.choice(documents)[: draw.choice(HEAD_TOKENS)]
        tail = [draw.randrange(3, vocab_size) for _ in range(draw.randrange(2, 120))]
        sampling = draw.choice(list(SAMPLINGS))
        asked.append(Question(number, (*head, *tail), sampling, draw.choice((4, 8, 16, 32, 64))))
    return asked


def orders(seed: int, asked: Sequence[Question], count: int) -> list[Order]:
    """A mix of cached and new, local and remote, patient and impatient."""
    draw = random.Random(f"orders {seed}")
    made = []
    for index in range(count):
        question = draw.choice(asked)
        era = index // ERA
        salt = f"era{era}.{draw.randrange(SALTS_PER_ERA)}" if draw.random() < 0.5 else f"own{index}"
        place: Literal["remote"] | None = "remote" if draw.random() < 0.75 else None
        leaves_after, patience_s = None, None
        if draw.random() < CANCELLED_SHARE:
            leaves_after = draw.randrange(question.max_tokens)
            patience_s = draw.choice((None, draw.uniform(0, 0.5)))
        made.append(
            Order(index, question, salt, place, leaves_after=leaves_after, patience_s=patience_s)
        )
    return made


async def ask(http: aiohttp.ClientSession, url: str, model: str, order: Order) -> Outcome:
    """Asks and reads the stream to its end, or leaves as the order says. Never raises."""
    outcome = Outcome(order, time.monotonic())
    try:
        async with asyncio.timeout(order.patience_s or HANG_S):
            await _exchange(http, url, order.question.body(model), outcome)
    except TimeoutError:
        outcome.has_left = order.patience_s is not None
        outcome.has_hung = not outcome.has_left
    except (aiohttp.ClientError, OSError, ValueError) as error:
        outcome.broken = f"{type(error).__name__}: {error}"
    outcome.finished_at = time.monotonic()
    return outcome


async def _exchange(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], outcome: Outcome
) -> None:
    order = outcome.order
    body = {**body, "cache_salt": order.cache_salt}
    if order.wants_margins:
        body["logprobs"] = 2
    async with http.post(url + "/v1/completions", json=body, headers=order.headers()) as response:
        outcome.status = response.status
        outcome.headers = {name.lower(): value for name, value in response.headers.items()}
        if response.content_type != "text/event-stream":
            error = (await response.json()).get("error", {})
            outcome.error = f"{error.get('code') or error.get('type')}: {error.get('message')}"
            return
        num_chunks = 0
        last_at = 0.0
        async for line in response.content:
            if order.leaves_after is not None and num_chunks >= order.leaves_after:
                outcome.has_left = True
                response.close()
                return
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                last_at = _note_time(outcome, last_at)
                _take(json.loads(line[6:]), outcome)
                num_chunks += 1
        if not outcome.error:
            outcome.broken = "the stream ended without [DONE] or an error"


def _note_time(outcome: Outcome, last_at: float) -> float:
    """Note the gap before an event that arrives now; return the time."""
    now = time.monotonic()
    if outcome.first_event_at is None:
        outcome.first_event_at = now
    elif now - last_at > outcome.largest_gap_s:
        outcome.largest_gap_s, outcome.gap_ended_at = now - last_at, now
    return now


def _take(event: dict[str, Any], outcome: Outcome) -> None:
    if "error" in event:
        error = event["error"]
        outcome.error = f"{error.get('code') or error.get('type')}: {error.get('message')}"
    for choice in event.get("choices", []):
        outcome.text += choice.get("text") or ""
        outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
        for top in (choice.get("logprobs") or {}).get("top_logprobs") or []:
            # bytes that are no text of their own share a name, and then there is one number
            best, *others = sorted(top.values(), reverse=True)
            if others:
                outcome.smallest_margin = min(outcome.smallest_margin, best - others[0])
    if event.get("usage"):
        outcome.num_tokens = event["usage"]["completion_tokens"]


async def undisturbed(
    http: aiohttp.ClientSession,
    url: str,
    model: str,
    asked: Sequence[Question],
    crowds: Sequence[int] = (6, 12, 24),
) -> dict[int, Outcome]:
    """Return the answer to each question before anything happens, by its number.

    Some have two nearly best tokens somewhere, and which one wins hangs on the rounding of the
    batch that it is computed in. They prove nothing, and are left out. `crowds` are numbers of
    questions that are asked at once.
    """

    async def all_answers(num_at_once: int, *, wants_margins: bool = False) -> dict[int, Outcome]:
        room = asyncio.Semaphore(num_at_once)

        async def one(question: Question) -> Outcome:
            salt = f"{num_at_once} {question.number}"
            is_greedy = question.sampling == "greedy"
            order = Order(-1, question, salt, "local", wants_margins=wants_margins and is_greedy)
            async with room:
                outcome = await ask(http, url, model, order)
            assert outcome.num_tokens == question.max_tokens, outcome
            return outcome

        return {o.order.question.number: o for o in await asyncio.gather(*map(one, asked))}

    alone = await all_answers(2, wants_margins=True)
    crowded = [await all_answers(num_at_once) for num_at_once in crowds]
    return {
        number: answer
        for number, answer in alone.items()
        if answer.smallest_margin > ROUNDING and all(c[number].text == answer.text for c in crowded)
    }
