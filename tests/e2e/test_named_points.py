"""Deaths, stops, losses and cancels at each named point of a handoff: same text, no block lost."""

import asyncio
import contextlib
import itertools
import json
import random
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tandem.decode.config import DisaggConfig
from tests.e2e.cluster import Answer, Cluster, write_sensitive_model
from tests.soak.points import HOLD_POLL_S, Action, Trap

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

DOOMED = Path(__file__).parents[1] / "soak" / "doomed_worker.py"
# several chunks to a prompt, so that some of it is written while the rest is still computed
FLAGS = ("--engine.max_num_batched_tokens=256", "--engine.num_blocks=400")
NUM_TOKENS = 1200
SAMPLINGS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 1234},
}
NAMED = ("before claim", "after claim", "mid-write", "before settled")
FINISHED_S = 3.0  # from a prefill worker's end to the whole answer
SLACK_S = 12.0  # a loaded machine
LEASE_S, GRACE_S = 1, 2.5 + 1  # and a moment more than transfer.grace_ms
NUM_FILLING = 8
FILLING_TOKENS = 350
TIMEOUTS = {"handoff_timeout_ms", "handoff_timeout_ms_per_token"}
_salts = itertools.count()


actions = pytest.mark.parametrize("action", ["kill", "stop"])


def prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 300) for _ in range(NUM_TOKENS)]


@dataclass
class Stage:
    """The cluster, the workers that are to suffer, and what undisturbed answers say."""

    cluster: Cluster
    folder: Path
    traps: dict[str, Trap] = field(default_factory=dict)  # role |-> its doomed worker's
    standbys: dict[str, Trap] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    texts: dict[tuple[int, str], str] = field(default_factory=dict)

    async def prepare(self, role: str) -> None:
        """A doomed worker of this role that has only to join: most of a start is imports."""
        if role in self.standbys:
            return
        name = f"doomed-{role}-{next(_salts)}"
        trap = self.standbys[role] = Trap(self.folder / name)
        entry = (str(DOOMED), json.dumps({"folder": str(trap.folder), "standby": True}))
        await self.cluster.start(name, role, *FLAGS, entry=entry)

    async def start_doomed(self, role: str) -> None:
        """A fresh doomed worker of this role; `registered` waits for it."""
        await self.prepare(role)
        trap = self.traps[role] = self.standbys.pop(role)
        self.names[role] = trap.folder.name
        trap.go()

    async def ask(self, seed: int, how: str, place: str = "remote", **options: Any) -> Answer:
        """An answer that shares no block with any other."""
        salt = f"{next(_salts)}"
        headers = {"x-tandem-prefill": place}
        options = {
            "max_tokens": 12,
            "ignore_eos": True,
            "cache_salt": salt,
            **SAMPLINGS[how],
            **options,
        }
        return await self.cluster.complete(prompt(seed), headers=headers, **options)

    async def ask_and_check(self, seed: int, how: str) -> Answer:
        answer = await self.ask(seed, how)
        assert answer.status == 200, answer
        assert answer.text == self.texts[seed, how]
        return answer

    def ask_all(self) -> list["asyncio.Task[Answer]"]:
        """Each sampling, whole and streamed."""
        return [
            asyncio.create_task(self.ask(seed, how, stream=stream))
            for seed, how in self.texts
            for stream in (False, True)
        ]

    def fill_the_pools(self) -> list["asyncio.Task[Answer]"]:
        """As many long answers at once as both decode workers have blocks for."""
        return [
            asyncio.create_task(self.ask(seed, "greedy", "local", max_tokens=FILLING_TOKENS))
            for seed in range(100, 100 + NUM_FILLING)
        ]

    async def caught(self, role: str, point: str, action: Action) -> list["asyncio.Task[Answer]"]:
        """Requests under way, one of which has just come to `point`."""
        trap = self.traps[role]
        trap.arm(point, action)
        while True:
            asking = self.ask_all()
            while not trap.has_fired and not all(task.done() for task in asking):
                await asyncio.sleep(HOLD_POLL_S)
            if trap.has_fired:
                return asking

    async def registered(self) -> None:
        await self.cluster.registered("decode0", *self.names.values())

    async def healed(self) -> None:
        """Everyone is there, remote prefills work, all of them right, and no block is lost."""
        await self.registered()
        places: set[str] = set()
        while "remote" not in places:
            answers = await asyncio.gather(
                *[self.ask_and_check(seed, how) for seed, how in self.texts]
            )
            places = {answer.place for answer in answers}
        await self.cluster.balanced()
        for worker in await self.cluster.statuses("decode"):
            assert worker.details["num_open_handoffs"] == 0
            assert worker.details["num_quarantined_blocks"] == 0

    async def bury(self, role: str) -> None:
        """A doomed worker that was killed is replaced by the next."""
        name = self.names[role]
        await self.cluster.children[name].wait()
        await self.cluster.end(name)
        await self.start_doomed(role)

    async def mend(self) -> None:
        """Whatever a scenario left behind, the next one finds a whole cluster."""
        for role, trap in self.traps.items():
            trap.disarm()
            child = self.cluster.children[self.names[role]]
            if child.exit_code is None:
                self.cluster.signal_child(child, signal.SIGCONT)
            else:
                await self.bury(role)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole_stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("points")
    async with Cluster(folder, write_sensitive_model(folder / "sensitive")) as cluster:
        stage = Stage(cluster, folder)
        await cluster.start("frontend", "frontend")
        await cluster.start("decode0", "decode", *FLAGS)
        await stage.start_doomed("decode")
        await stage.start_doomed("prefill")
        await cluster.ready(1, 2)
        for seed, how in enumerate(SAMPLINGS):
            stage.texts[seed, how] = (await stage.ask(seed, how, "local")).text
        yield stage


@pytest_asyncio.fixture(loop_scope="module")
async def stage(whole_stage: Stage) -> AsyncIterator[Stage]:
    await whole_stage.mend()
    await whole_stage.registered()
    yield whole_stage


def right(stage: Stage, answers: list[Answer]) -> list[bool]:
    texts = [text for text in stage.texts.values() for _ in range(2)]
    return [
        answer.status == 200 and answer.text == text
        for answer, text in zip(answers, texts, strict=True)
    ]


def is_typed_error(answer: Answer) -> bool:
    if answer.chunks:
        return bool(answer.chunks[-1].get("error", {}).get("message"))
    return answer.status in (502, 503) and bool(answer.body["error"]["message"])


async def answers_after(stage: Stage, role: str, point: str, action: Action) -> list[Answer]:
    """Answers of requests under way when a worker ends at `point`; they do not take long."""
    asking = await stage.caught(role, point, action)
    ended_at = await stage.traps[role].fired()
    await stage.bury(role) if action == "kill" else await stage.prepare(role)
    answers = await asyncio.gather(*asking)
    elapsed_s = time.monotonic() - ended_at
    print(f"\n{action} of {role} {point}: all answers {elapsed_s:.2f} s later")
    assert elapsed_s < FINISHED_S + SLACK_S
    return answers


@actions
@pytest.mark.parametrize("point", NAMED)
async def test_the_end_of_a_prefill_worker_costs_time_and_nothing_else(
    stage: Stage, point: str, action: Action
) -> None:
    assert all(right(stage, await answers_after(stage, "prefill", point, action)))
    if action == "stop":
        await asyncio.gather(*[stage.ask_and_check(*key) for key in stage.texts])
        await stage.mend()
    await stage.healed()


@actions
@pytest.mark.parametrize("point", NAMED)
async def test_the_end_of_a_decode_worker_ends_no_more_than_its_own_streams(
    stage: Stage, point: str, action: Action
) -> None:
    answers = await answers_after(stage, "decode", point, action)
    verdicts = right(stage, answers)
    assert all(verdicts[::2]), "nobody has seen a whole answer yet: it is asked for elsewhere"
    assert all(ok or is_typed_error(answer) for ok, answer in zip(verdicts, answers, strict=True))
    if action == "stop":
        await stage.mend()
    await stage.healed()


@pytest.mark.parametrize("point", ["after claim", "mid-write", "inside a post"])
async def test_a_prefill_worker_that_wakes_after_its_lease_harms_nobody(
    stage: Stage, point: str
) -> None:
    """What it was in the middle of posting lands in blocks that nobody has been given."""
    cluster = stage.cluster
    await cluster.set_config("disagg.handoff_timeout_ms", LEASE_S * 1000)
    await cluster.set_config("disagg.handoff_timeout_ms_per_token", 0.0)
    try:
        undisturbed = await asyncio.gather(*stage.fill_the_pools())
        asking = await stage.caught("prefill", point, "stop")
        assert all(right(stage, await asyncio.gather(*asking)))

        await asyncio.sleep(LEASE_S + GRACE_S)
        workers = await cluster.statuses("decode")
        assert any(worker.details["num_quarantined_blocks"] for worker in workers)
        filling = stage.fill_the_pools()
        cluster.send_signal(stage.names["prefill"], signal.SIGCONT)
        answers = await asyncio.gather(*filling)
        assert [answer.text for answer in answers] == [answer.text for answer in undisturbed]
    finally:
        for key, value in DisaggConfig().model_dump(include=TIMEOUTS).items():
            await cluster.set_config(f"disagg.{key}", value)
    await stage.healed()


@pytest.mark.parametrize("service", ["nats", "etcd"])
@pytest.mark.parametrize(
    ("point", "empty"), [*((point, False) for point in NAMED), ("mid-write", True)]
)
async def test_losing_a_service_in_the_middle_of_a_handoff_changes_no_answer(
    stage: Stage, point: str, service: str, empty: bool
) -> None:
    asking = await stage.caught("prefill", point, "hold")
    server = stage.cluster.nats if service == "nats" else stage.cluster.etcd
    await server.restart(empty=empty)
    stage.traps["prefill"].release()
    assert all(right(stage, await asyncio.gather(*asking)))
    await stage.healed()


@pytest.mark.parametrize(
    ("role", "point"), [("decode", "before publish"), *(("prefill", point) for point in NAMED)]
)
async def test_a_client_that_leaves_takes_its_blocks_with_it(
    stage: Stage, role: str, point: str
) -> None:
    asking = await stage.caught(role, point, "hold")
    for task in asking:
        task.cancel()
    for task in asking:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    stage.traps[role].release()
    await stage.healed()
