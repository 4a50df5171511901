"""Crowds of clients: every request ends, also where decode workers die, stop or leave meanwhile."""

import asyncio
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

from tandem.runtime.address import new_id
from tests.e2e.cluster import Answer, Cluster, events

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_WORKERS = (1, 2)
NUM_REQUESTS = 60  # after as many, the kinds of requests repeat
# who leaves gives its streams up soon, so that they are not all over by then
FLAGS = ("--runtime.drain_timeout_s=0.1",)
NUM_TOKENS = 240
NUM_SAID = 1  # chunks of a worker's stream before anything happens; each may be many tokens
NUM_STRIKES = 5  # on a busy machine all streams may be over before a signal is there
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "headers": {"x-tandem-prefill": "remote"}},
    {"temperature": 0.9, "top_p": 0.95, "seed": 1234, "n": 2},
    {
        "temperature": 0.8, "seed": 7, "presence_penalty": 0.6, "frequency_penalty": 0.4,
        "repetition_penalty": 1.1, "headers": {"x-tandem-prefill": "remote"},
    },
    {"temperature": 0.7, "seed": 99, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.8, "seed": 3, "min_tokens": 200, "ignore_eos": False},
]  # fmt: skip
QUESTIONS = ["Hello!", "Tell me a story about a fox and an old house."]


async def ask_one(cluster: Cluster, number: int) -> Answer | None:
    """A request of a kind that its number chooses; None for one that hangs up."""
    draw = random.Random(number)
    prompt = [draw.randrange(3, 1000) for _ in range(draw.choice((3, 30, 200)))]
    options: dict[str, object] = {
        "max_tokens": draw.randrange(1, 24),
        "temperature": draw.choice((0, 0.8)),
        "seed": number,
        "stream": bool(number % 2),
        "headers": {"x-tandem-prefill": "remote"} if number % 3 == 0 else {},
    }
    if number % 10 == 7:
        return await hang_up(cluster, prompt)
    if number % 10 == 9:
        return await cluster.complete(prompt, **{**options, "n": 2})
    if number % 20 == 4:
        return await cluster.complete(prompt, **{**options, "max_tokens": -1})
    return await cluster.complete(prompt, **options)


async def hang_up(cluster: Cluster, prompt: list[int]) -> None:
    body = {"model": cluster.model_name, "prompt": prompt, "max_tokens": 500, "stream": True}
    body["ignore_eos"] = True
    async with cluster.http.post(cluster.base_url + "/v1/completions", json=body) as response:
        assert response.status == 200
        await response.content.readline()
        response.close()


async def test_every_request_of_a_crowd_ends_and_the_pools_balance(cluster: Cluster) -> None:
    await cluster.set_config("disagg.policy", "threshold")
    await cluster.set_config("disagg.max_local_prefill_length", 100)
    answers = await asyncio.gather(*[ask_one(cluster, number) for number in range(NUM_REQUESTS)])
    for number, answer in enumerate(answers):
        if number % 10 == 7:
            assert answer is None
        elif number % 20 == 4:
            assert answer is not None and answer.status == 400
        else:
            assert answer is not None and answer.status == 200, answer
            assert answer.place in ("local", "remote")
    await cluster.balanced()
    for worker in await cluster.statuses("decode"):
        assert worker.details["num_open_handoffs"] == 0
        assert worker.details["num_quarantined_blocks"] == 0
    # the frontend is through with a client that left a bit later
    while await num_inflight(cluster) > 0:
        await asyncio.sleep(0.05)


async def num_inflight(cluster: Cluster) -> float:
    """Requests in the frontend's hands, by its metrics."""
    metrics = (await cluster.get("/metrics")).body["text"].splitlines()
    inflight = [line for line in metrics if line.startswith("tandem_frontend_inflight_requests")]
    assert inflight
    return sum(float(line.split()[-1]) for line in inflight)


async def test_a_seeded_answer_is_the_same_alone_and_in_a_crowd(cluster: Cluster) -> None:
    options = {"max_tokens": 20, "temperature": 0.8, "seed": 11}
    alone = await cluster.chat("Tell me a story about a cat.", **options)
    crowd = [cluster.chat("Tell me a story about a cat.", **options) for _ in range(8)]
    noise = [cluster.complete([number, 5, 6], max_tokens=20) for number in range(3, 20)]
    answers = await asyncio.gather(*crowd, *noise)
    assert {answer.text for answer in answers[:8]} == {alone.text}


async def test_no_process_listens_beyond_this_machine(cluster: Cluster) -> None:
    for child in (*cluster.children.values(), cluster.nats.child):
        sockets = psutil.Process(child.pid).net_connections(kind="tcp")
        listening = {socket.laddr.ip for socket in sockets if socket.status == "LISTEN"}
        assert listening == {"127.0.0.1"}, child.log_path


@dataclass
class Heard:
    """What one client got, and when."""

    texts: dict[int, str] = field(default_factory=dict)  # by choice
    tokens: list[str] = field(default_factory=list)  # those with logprobs
    reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    instance_id: str = ""
    times: list[float] = field(default_factory=list)  # perf_counter, of each chunk

    @property
    def answer(self) -> tuple[object, ...]:
        """All that must not depend on what happened to workers."""
        counts = (self.usage.get("prompt_tokens"), self.usage.get("completion_tokens"))
        return (self.texts, self.tokens, self.reasons, counts, self.error)

    def gap_s(self, since: float) -> float:
        """The longest time between two chunks that `since` lies before the end of."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in pairs if after >= since), default=0.0)


@dataclass
class Crowd:
    """All clients together."""

    heard: list[Heard] = field(default_factory=list)
    caught: asyncio.Future[str] = field(  # a worker in the middle of an answer, by instance id
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def answers(self) -> list[tuple[object, ...]]:
        return [each.answer for each in self.heard]

    async def ask_all(self, cluster: Cluster) -> None:
        """Asks every question in every way at once, and listens to the end."""
        async with asyncio.TaskGroup() as group:
            for kind in KINDS:
                for question in QUESTIONS:
                    heard = Heard()
                    self.heard.append(heard)
                    group.create_task(listen(cluster, question, kind, heard, self.look))

    def look(self) -> None:
        for heard in self.heard:
            if len(heard.times) > NUM_SAID and not heard.reasons and not self.caught.done():
                self.caught.set_result(heard.instance_id)


async def listen(
    cluster: Cluster, question: str, kind: dict[str, Any], heard: Heard, look: Callable[[], None]
) -> None:
    body = {
        "model": cluster.model_name,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "cache_salt": new_id(),  # nobody has it cached, so that the load alone decides who answers
    } | kind
    headers = body.pop("headers", {})
    url = cluster.base_url + "/v1/chat/completions"
    async with cluster.http.post(url, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        heard.instance_id = response.headers["x-tandem-decode-instance"]
        async for event in events(response):
            take(heard, event)
            look()


def take(heard: Heard, event: dict[str, Any]) -> None:
    if "error" in event:
        heard.error = str(event["error"])
        return
    heard.times.append(time.perf_counter())
    heard.usage = event.get("usage") or heard.usage
    for choice in event["choices"]:
        index = choice["index"]
        heard.texts[index] = heard.texts.get(index, "") + (choice["delta"].get("content") or "")
        if choice["logprobs"]:
            heard.tokens += [token["token"] for token in choice["logprobs"]["content"]]
        if choice["finish_reason"]:
            assert index not in heard.reasons
            heard.reasons[index] = choice["finish_reason"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(cluster: Cluster) -> Crowd:
    """All clients while nothing happens."""
    crowd = Crowd()
    await crowd.ask_all(cluster)
    return crowd


async def num_migrations(cluster: Cluster) -> float:
    text = (await cluster.get("/metrics")).body["text"]
    lines = [
        line for line in text.splitlines() if line.startswith("tandem_frontend_migrations_total")
    ]
    return sum(float(line.rpartition(" ")[2]) for line in lines if 'kind="ongoing"' in line)


async def test_while_nothing_happens_every_answer_is_whole(undisturbed: Crowd) -> None:
    assert not any(each.error for each in undisturbed.heard)
    for heard in undisturbed.heard:
        assert heard.reasons and set(heard.reasons.values()) <= {"length", "stop"}


@pytest.mark.parametrize(
    "number",
    [
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGTERM, signal.SIGSTOP)),
        signal.SIGKILL,
    ],
)
async def test_every_answer_ends_as_if_nothing_had_happened(
    cluster: Cluster, undisturbed: Crowd, number: signal.Signals
) -> None:
    for _ in range(NUM_STRIKES):
        crowd, num_moved, struck_at = await strike(cluster, number)
        assert crowd.answers == undisturbed.answers
        if num_moved > 0:
            break
    assert num_moved > 0, "every stream was over before each signal came"
    gaps = sorted(each.gap_s(struck_at) for each in crowd.heard)
    print(f"\n{number.name}: {num_moved:g} choices moved, longest gaps {gaps[-3:]} s")


async def strike(cluster: Cluster, number: signal.Signals) -> tuple[Crowd, float, float]:
    """A crowd, one of whose workers gets the signal in mid-answer; all serve again afterwards.

    Returns it, the choices that moved to another worker, and the signal's `perf_counter`.
    """
    num_before = await num_migrations(cluster)
    pids = {each.instance_id: each.pid for each in await cluster.instances()}
    names = {child.pid: name for name, child in cluster.children.items()}
    crowd = Crowd()
    asking = asyncio.create_task(crowd.ask_all(cluster))
    await asyncio.wait((asking, crowd.caught), return_when=asyncio.FIRST_COMPLETED)
    struck = names[pids[crowd.caught.result()]]
    struck_at = time.perf_counter()
    cluster.send_signal(struck, number)
    try:
        await asking
    finally:
        cluster.send_signal(struck, signal.SIGCONT)  # else the next test finds it standing still
    num_moved = await num_migrations(cluster) - num_before
    if number != signal.SIGSTOP:
        await cluster.end(struck)
        await cluster.ready(1, 1)
        await cluster.start(struck, "decode", *FLAGS)
    await cluster.ready(1, 2)
    await cluster.balanced()
    await until_both_answer(cluster)
    return crowd, num_moved, struck_at


async def until_both_answer(cluster: Cluster) -> None:
    """A worker that was lost gets no new requests for a while, though it is well again.

    One that seems slow, by a factor of MAX_SLOWNESS at most, gets some of many only.
    """
    num_workers = len(await cluster.statuses("decode"))
    who: set[str] = set()
    while len(who) < num_workers:
        answers = [cluster.chat("Hello!", max_tokens=1, cache_salt=new_id()) for _ in range(10)]
        who = {each.headers["x-tandem-decode-instance"] for each in await asyncio.gather(*answers)}


async def test_every_process_ends_when_it_is_told_to(cluster: Cluster) -> None:
    children = dict(cluster.children)
    for name in list(children):
        await cluster.end(name)
        assert children[name].exit_code == 0, children[name].log_tail()
    assert await cluster.instances() == []
    with pytest.raises(aiohttp.ClientError):
        await cluster.get("/live")
