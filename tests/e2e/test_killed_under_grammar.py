"""A decode worker killed in the middle of answers that follow a grammar."""

import asyncio
import json
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import pytest

from tandem.runtime.address import new_id
from tests.e2e.cluster import Cluster, events
from tests.grammar.answers import CASES, PERSON

TIMEOUT_S = 240.0  # on a machine that others keep busy; seconds on a quiet one
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.timeout(2 * TIMEOUT_S),
]

NUM_WORKERS = (1, 2)
NUM_CHOICES = 2
NUM_CHUNKS = 6  # of a stream before its worker is killed
MAX_TOKENS = 1000  # every answer ends before
SEED = 1
MAILS = r"([a-f]{2,5}@(x|yy)\.(org|com);){15}"
SUM = r"[0-9]( ?[+*] ?[0-9]){40}"


class Kind(NamedTuple):
    """Fields of a request, and the check of its answers."""

    fields: dict[str, Any]
    is_valid: Callable[[str], bool]


def _people(text: str) -> bool:
    people = json.loads(text)
    return len(people) == 5 and all(
        CASES["json_schema"].is_valid(json.dumps(each)) for each in people
    )


PEOPLE = {"type": "array", "items": PERSON, "minItems": 5, "maxItems": 5}
KINDS = {
    "json": Kind({"guided_json": PEOPLE}, _people),
    "regex": Kind({"guided_regex": MAILS}, lambda text: re.fullmatch(MAILS, text) is not None),
    "lark": Kind(
        {"guided_grammar": 'start: D (" "? ("+" | "*") " "? D){40}\nD: /[0-9]/'},
        lambda text: re.fullmatch(SUM, text) is not None,
    ),
    "gbnf": Kind(
        {"guided_grammar": 'root ::= part part\npart ::= ("no" | "[" [a-c] "]"){30}'},
        lambda text: re.fullmatch(r"(no|\[[a-c]\]){60}", text) is not None,
    ),
}


@dataclass
class Round:
    """Answers of every kind, prefilled locally and remotely, at the same time."""

    texts: dict[tuple[str, str, int], str] = field(default_factory=dict)  # kind, place, choice
    busy: asyncio.Future[str] = field(  # the worker in the middle of an answer, by instance id
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    async def ask_all(self, cluster: Cluster) -> None:
        async with asyncio.TaskGroup() as group:
            for name in KINDS:
                for place in ("local", "remote"):
                    group.create_task(self._ask(cluster, name, place))

    async def _ask(self, cluster: Cluster, name: str, place: str) -> None:
        body = {
            "model": cluster.model_name,
            "prompt": f"The answer, as {name}:",
            "stream": True,
            "temperature": 1.2,
            "seed": SEED,
            "n": NUM_CHOICES,
            "max_tokens": MAX_TOKENS,
            "cache_salt": new_id(),
            **KINDS[name].fields,
        }
        url, headers = cluster.base_url + "/v1/completions", {"x-tandem-prefill": place}
        num_chunks = 0
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        posted = cluster.http.post(url, json=body, headers=headers, timeout=timeout)
        async with posted as response:
            assert response.status == 200, await response.text()
            async for event in events(response):
                assert "error" not in event, event
                num_chunks += 1
                for choice in event["choices"]:
                    key = (name, place, choice["index"])
                    self.texts[key] = self.texts.get(key, "") + choice["text"]
                    assert choice["finish_reason"] in (None, "stop")
                if num_chunks > NUM_CHUNKS and not self.busy.done():
                    self.busy.set_result(response.headers["x-tandem-decode-instance"])

    def check(self) -> None:
        """Assert that all answers are there, each by its grammar, with either prefill."""
        assert len(self.texts) == len(KINDS) * 2 * NUM_CHOICES
        for (name, _, choice), text in self.texts.items():
            assert KINDS[name].is_valid(text), (name, text)
            assert text == self.texts[name, "local", choice]


async def kill_one(cluster: Cluster, asked: Round) -> None:
    """Kill a decode worker that is in the middle of an answer."""
    pids = {each.instance_id: each.pid for each in await cluster.instances()}
    names = {child.pid: name for name, child in cluster.children.items()}
    cluster.send_signal(names[pids[await asked.busy]], signal.SIGKILL)


async def test_every_answer_follows_its_grammar_though_a_worker_is_killed(
    cluster: Cluster,
) -> None:
    harmed, whole = Round(), Round()
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        asking = group.create_task(harmed.ask_all(cluster))
        await kill_one(cluster, harmed)
        assert not asking.done(), "every stream was over before the worker was killed"
    harmed.check()
    await whole.ask_all(cluster)
    assert harmed.texts == whole.texts
