"""Workers killed in the middle of answers of random weights that follow a grammar.

CONSTRAINED_ANSWERS=10000 python -m pytest -s tests/e2e/test_killed_under_grammar.py
"""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio

from tandem.models.random_model import write_random_model
from tandem.runtime.address import new_id
from tests.e2e.cluster import Cluster, events
from tests.grammar.answers import CASES, PERSON

NUM_ANSWERS = int(os.environ.get("CONSTRAINED_ANSWERS", "72"))  # at least; in whole bouts
MAX_SEEDS = 24  # of a bout
NUM_CHOICES = 2
NUM_CHUNKS = 6  # of a stream before its worker is killed
MAX_TOKENS = 1000  # every answer ends before, but for free text
TIMEOUT_S = 600.0  # of a bout, on a machine that others keep busy; seconds on a quiet one
MAILS = r"([a-f]{2,5}@(x|yy)\.(org|com);){15}"
SUM = r"[0-9]( ?[+*] ?[0-9]){40}"


class Kind(NamedTuple):
    """Fields of a request, and the check of its answers."""

    fields: dict[str, Any]
    is_valid: Callable[[str], bool]
    has_end: bool = True


def _pattern(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def _people(text: str) -> bool:
    people = json.loads(text)
    return len(people) == 5 and all(
        CASES["json_schema"].is_valid(json.dumps(each)) for each in people
    )


PEOPLE = {"type": "array", "items": PERSON, "minItems": 5, "maxItems": 5}
COLORS = ["red", "reddish", "blue, or so"]
MARKED = {  # an "a" of the text begins a boolean
    "type": "structural_tag",
    "structures": [{"begin": "a", "schema": {"type": "boolean"}, "end": "."}],
    "triggers": ["a"],
}
KINDS = {
    "json": Kind({"guided_json": PEOPLE}, _people),
    "regex": Kind({"guided_regex": MAILS}, _pattern(MAILS)),
    "lark": Kind(
        {"guided_grammar": 'start: D (" "? ("+" | "*") " "? D){40}\nD: /[0-9]/'}, _pattern(SUM)
    ),
    "gbnf": Kind(
        {"guided_grammar": 'root ::= part part\npart ::= ("no" | "[" [a-c] "]"){30}'},
        _pattern(r"(no|\[[a-c]\]){60}"),
    ),
    "choice": Kind({"guided_choice": COLORS}, COLORS.__contains__),
    "structural tag": Kind(
        {"response_format": MARKED, "max_tokens": 200},
        _pattern(r"(?s)([^a]|a(true|false)\.)*(a[a-z]{0,5})?"),
        has_end=False,
    ),
}
NUM_OF_SEED = len(KINDS) * 2 * NUM_CHOICES  # answers
NUM_SEEDS = min(MAX_SEEDS, -(-NUM_ANSWERS // NUM_OF_SEED))
NUM_EACH = NUM_SEEDS * NUM_OF_SEED  # answers of a bout
NUM_BOUTS = -(-NUM_ANSWERS // NUM_EACH)
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.timeout(TIMEOUT_S * (1 + NUM_BOUTS)),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    model = write_random_model(tmp_path_factory.mktemp("model"))
    async with Cluster(tmp_path_factory.mktemp("cluster"), model) as cluster:
        await cluster.start_all(2, 2)
        yield cluster


@dataclass
class Bout:
    """Answers of every kind, prefilled locally and remotely, at the same time."""

    seeds: range
    texts: dict[tuple[int, str, str, int], str] = field(default_factory=dict)  # and their choice
    busy: asyncio.Future[str] = field(  # the worker in the middle of an answer, by instance id
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    async def ask_all(self, cluster: Cluster) -> None:
        async with asyncio.TaskGroup() as group:
            for seed in self.seeds:
                for name in KINDS:
                    for place in ("local", "remote"):
                        group.create_task(self._ask(cluster, seed, name, place))

    async def _ask(self, cluster: Cluster, seed: int, name: str, place: str) -> None:
        body = {
            "model": cluster.model_name, "prompt": f"The answer {seed}, as {name}:", "stream": True,
            "temperature": 1.2, "seed": seed, "n": NUM_CHOICES, "max_tokens": MAX_TOKENS,
            "cache_salt": new_id(), **KINDS[name].fields,
        }  # fmt: skip
        url, headers = cluster.base_url + "/v1/completions", {"x-tandem-prefill": place}
        ends = {"stop"} if KINDS[name].has_end else {"stop", "length"}
        num_chunks, num_ends = 0, 0
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        posted = cluster.http.post(url, json=body, headers=headers, timeout=timeout)
        async with posted as response:
            assert response.status == 200, await response.text()
            async for event in events(response):
                assert "error" not in event, event
                num_chunks += 1
                for choice in event["choices"]:
                    key = (seed, name, place, choice["index"])
                    self.texts[key] = self.texts.get(key, "") + choice["text"]
                    if choice["finish_reason"] is not None:
                        assert choice["finish_reason"] in ends, (key, self.texts[key])
                        num_ends += 1
                if num_chunks > NUM_CHUNKS and not self.busy.done():
                    self.busy.set_result(response.headers["x-tandem-decode-instance"])
        assert num_ends == NUM_CHOICES

    def check(self) -> None:
        """Assert that all answers are there, each by its grammar, with either prefill."""
        assert len(self.texts) == NUM_EACH
        for (seed, name, _, choice), text in self.texts.items():
            assert KINDS[name].is_valid(text), (seed, name, text)
            assert text == self.texts[seed, name, "local", choice]


async def kill_two(cluster: Cluster, bout: Bout) -> list[str]:
    """Kill a decode worker in the middle of an answer, and a prefill worker; return their names."""
    pids = {each.instance_id: each.pid for each in await cluster.instances()}
    names = {child.pid: name for name, child in cluster.children.items()}
    killed = [names[pids[await bout.busy]], "prefill0"]
    for name in killed:
        cluster.send_signal(name, signal.SIGKILL)
    return killed


async def test_every_answer_follows_its_grammar_though_workers_are_killed(cluster: Cluster) -> None:
    for index in range(NUM_BOUTS):
        bout = Bout(range(index * NUM_SEEDS, (index + 1) * NUM_SEEDS))
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            asking = group.create_task(bout.ask_all(cluster))
            killed = await kill_two(cluster, bout)
            assert not asking.done(), "every stream was over before the workers were killed"
        bout.check()
        print(f"{(index + 1) * NUM_EACH} valid answers")
        if index == 0:
            whole = Bout(bout.seeds)
            await whole.ask_all(cluster)
            assert bout.texts == whole.texts
        if index + 1 < NUM_BOUTS:
            for name in killed:
                await cluster.end(name)
                await cluster.start(name, name.rstrip("01"))
            await cluster.ready(2, 2)
