"""The page and its stream over HTTP: bounds, states, changes."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from starlette.types import Message

from tandem.frontend.http.exchange import CONNECTION
from tandem.frontend.ui import collector, pages
from tandem.frontend.ui import state as state_module
from tandem.frontend.ui.page.files import PAGE_PATHS
from tandem.runtime.errors import ModelError
from tandem.runtime.store.discovery import config_key
from tandem.runtime.store.planner_report import PlannedModel, PlannerReport, planner_prefix
from tandem.runtime.store.progress_report import ProgressReport, progress_prefix
from tests.frontend.frontend_stack import MODEL, Stack
from tests.frontend.ui.page_stack import (
    HANDOFF,
    StatusWorker,
    anext_state,
    hand_off,
    page_config,
    page_stack,
    states,
)
from tests.services import eventually

PACE = "test_pages_share_one_collector_that_rests_without_them_and_has_its_pace"


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """States come faster, but for the test of their pace."""
    if request.node.name != PACE:
        monkeypatch.setattr(collector, "INTERVAL_S", 0.05)


async def first_with(
    found: AsyncIterator[dict[str, Any]], condition: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    async for state in found:
        if condition(state):
            return state
    raise AssertionError("the stream ended")


async def test_the_files_of_the_page_come_with_a_strict_policy_and_no_inline_code(
    page: Stack,
) -> None:
    for path in PAGE_PATHS:
        response = await page.http.get(path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert unsafe not in response.text
        assert not re.search(r"<[^>]*\s(on[a-z]+|style)=|<script>|<style>", response.text)
    assert (await page.http.get("/ui/../config.py")).status_code == 404


async def test_a_state_has_workers_queue_thresholds_placements_and_handoffs(page: Stack) -> None:
    page.worker.script = hand_off
    page.worker.details |= {"disagg.ttft_target_ms": 0.001, "tp": 2}
    async with states(page) as found:
        await anext(found)
        assert (await page.chat()).status_code == 200
        state = await first_with(
            found,
            lambda each: (
                bool(each["handoffs"] and each["latencies"])
                and not each["workers"][0]["is_stopped"]
            ),
        )
    (worker,) = state["workers"]
    assert worker["id"] == page.worker.instance_id and not worker["is_stopped"]
    counts = [
        worker[f"num_{name}"]
        for name in ("ranks", "running", "blocks", "used_blocks", "cached_blocks")
    ]
    assert counts == [2, 3, 100, 30, 10]
    assert state["queues"] == [{"model": MODEL, "deployment": "", "num_jobs": 5, "num_tokens": 900}]
    assert state["thresholds"][MODEL]["policy"] == "adaptive"
    reason = "uncached 412 > max_local_prefill_length 200"
    assert state["placements"] == [
        {"place": "remote", "cause": "long", "num": 1, "example": reason}
    ]
    (handoff,) = state["handoffs"]
    assert handoff["prefill_instance"] == "prefiller" and handoff["timeline_ms"] == HANDOFF
    assert [each["prefill_instance"] for each in state["begun"]] == ["prefiller"]
    ttft = next(each for each in state["latencies"] if each["kind"] == "ttft")
    assert ttft["num"] == 1 and ttft["target_ms"] == 0.001 and ttft["p95_ms"] > 0.001


async def test_a_prefill_worker_that_idles_while_prompts_wait_is_told_with_the_cause(
    page: Stack,
) -> None:
    page.worker.details["prompts.local.slower"] = 7
    async with states(page) as found:
        assert (await anext(found))["idle_prefill"] == []
        idle = await page.add_worker(
            StatusWorker, endpoint="tandem.prefill.generate", role="prefill", load=(0, 0, 0)
        )
        [told] = (await first_with(found, lambda each: bool(each["idle_prefill"])))["idle_prefill"]
    assert told["decode_instance"] == page.worker.instance_id != idle.instance_id
    assert (told["num_idle"], told["cause"], told["num_local"]) == (1, "slower", 7)


async def test_a_worker_that_stops_answering_is_stopped_and_one_that_leaves_is_too(
    page: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "STOPPED_S", 0.5)
    monkeypatch.setattr(collector, "_CALL_TIMEOUT_S", 0.3)
    other = StatusWorker(page.store, page.listeners)
    await other.start()
    async with states(page) as found:
        await first_with(found, lambda each: len(each["workers"]) == 2)
        await other.leave()

        def is_marked(state: dict[str, Any]) -> bool:
            marked = {each["id"]: each for each in state["workers"] if each["is_stopped"]}
            return set(marked) == {other.instance_id} and (
                "has left" in marked[other.instance_id]["state"]
            )

        await first_with(found, is_marked)
        page.worker.is_frozen = True
        state = await first_with(found, lambda each: all(w["is_stopped"] for w in each["workers"]))
        assert any("does not answer" in worker["state"] for worker in state["workers"])
        page.worker.is_frozen = False
        await first_with(found, lambda each: not all(w["is_stopped"] for w in each["workers"]))


async def test_a_worker_that_starts_has_its_progress_until_it_serves(page: Stack) -> None:
    report = ProgressReport("decode", "m", "h", 7, "weights: 12 s, 40 %, about 3 s left", 0.4)
    key = progress_prefix("tandem") + "r-1"
    async with states(page) as found:
        await first_with(found, lambda each: each["starting"] == [])
        page.store.set(key, msgspec.json.encode(report))
        state = await first_with(found, lambda each: each["starting"])
        (starting,) = state["starting"]
        assert starting == {
            "id": "r-1",
            "name": "decode of m at h (process 7)",
            "line": report.line,
            "share": 0.4,
        }
        page.store.set(key, None)
        await first_with(found, lambda each: each["starting"] == [])


async def test_a_planner_says_what_it_sees_and_why_it_moved_a_role(page: Stack) -> None:
    model = PlannedModel("m", "d", 1, 3, "both sides have room", 2, "d0 to prefill")
    key = planner_prefix("tandem") + "p-1"
    async with states(page) as found:
        await first_with(found, lambda each: each["planners"] == [])
        page.store.set(key, msgspec.json.encode(PlannerReport("p-1", "act", [model])))
        state = await first_with(found, lambda each: each["planners"])
        assert state["planners"] == [
            "planner (act), m: both sides have room",
            "  last of 2 changes: d0 to prefill",
        ]
        page.store.set(key, None)
        await first_with(found, lambda each: each["planners"] == [])


async def test_pages_share_one_collector_that_rests_without_them_and_has_its_pace(
    page: Stack,
) -> None:
    await page.chat()
    assert page.worker.num_asked == 0
    async with states(page) as one, states(page) as two:
        await anext(one)
        began_s, num_before = time.perf_counter(), page.worker.num_asked
        for _ in range(2):
            assert await anext(one) and await anext(two)
        elapsed_s = time.perf_counter() - began_s
        assert elapsed_s > 2 / 5
        assert page.worker.num_asked - num_before <= 5 * elapsed_s + 1
    assert not (await anext_state(page))["placements"]  # that of a page before is forgotten
    await eventually(lambda: not page.server.recent.is_open)
    num_asked = page.worker.num_asked
    await page.chat()
    assert page.worker.num_asked == num_asked
    assert not page.server.recent.causes


async def test_the_number_of_pages_is_bounded_and_a_page_that_leaves_makes_room() -> None:
    async with page_stack(config=page_config(max_pages=1)) as stack:
        async with states(stack) as found:
            await anext(found)
            refused = await stack.http.get("/ui/states")
            assert refused.status_code == 429
            assert "1 pages are open" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"]
        await eventually(lambda: not stack.server.recent.is_open)
        assert (await anext_state(stack))["workers"]
    async with page_stack(config=page_config(max_pages=0)) as stack:
        for path in ("/ui", "/ui/app.js", "/ui/states"):
            assert (await stack.http.get(path)).status_code == 404
        value = "/ui/config/disagg.policy?value=threshold"
        assert (await stack.http.put(value)).status_code == 404


async def test_a_live_value_is_checked_set_and_its_former_value_is_the_answer(page: Stack) -> None:
    key = config_key("tandem", "disagg.max_local_prefill_length")
    path = "/ui/config/disagg.max_local_prefill_length"
    assert (await page.http.put(f"{path}?value=200")).json() == {}
    assert (await page.http.put(f"{path}?value=300")).json() == {"was": 200}
    assert page.store.items[key] == b"300"
    for bad, word in (("?value=-5", "greater"), ("?value=x", "integer"), ("", "value")):
        refused = await page.http.put(path + bad)
        assert refused.status_code == 400 and word in refused.json()["error"]["message"]
    for name in ("runtime.nats_url", "disagg.nothing", "nothing"):
        assert (await page.http.put(f"/ui/config/{name}?value=1")).status_code == 400
    assert (await page.http.delete("/ui/config/nothing")).status_code == 400
    assert page.store.items[key] == b"300"
    own = config_key("tandem", "disagg.ttft_target_ms", MODEL)
    target = "/ui/config/disagg.ttft_target_ms"
    assert (await page.http.put(target, params={"value": "50", "model": MODEL})).json() == {}
    assert page.store.items[own] == b"50.0"
    assert (await page.http.put(target, params={"value": "1", "model": "no"})).status_code == 404
    assert (await page.http.delete(path)).json() == {"was": 300}
    assert key not in page.store.items


async def test_a_role_is_changed_at_a_worker_that_the_page_shows(page: Stack) -> None:
    async with states(page) as found:
        await anext(found)
        path = f"/ui/role/{page.worker.instance_id}"
        assert (await page.http.put(f"{path}?role=prefill")).status_code == 200
        await first_with(found, lambda each: each["workers"][0]["role"] == "prefill")
        assert (await page.http.put(f"{path}?role=king")).status_code == 400
        assert (await page.http.put("/ui/role/nobody?role=both")).status_code == 404
        page.worker.refusal = ModelError("this worker has no prefill role")
        refused = await page.http.put(f"{path}?role=prefill")
        assert refused.status_code == 503
        assert "no prefill role" in refused.json()["error"]["message"]


async def test_open_pages_do_not_hold_up_the_end_of_the_frontend(page: Stack) -> None:
    async with states(page) as found:
        await anext(found)
        async with asyncio.timeout(1.5):
            await page.server.stop()
        with pytest.raises(StopAsyncIteration):
            while True:
                await anext(found)


async def test_a_page_that_reads_nothing_leaves_its_place(
    page: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_WRITE_TIMEOUT_S", 0.05)
    never = asyncio.Event()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await never.wait()

    async def receive() -> Message:
        await never.wait()
        raise AssertionError

    scope = {"type": "http", "headers": [], CONNECTION: Mock()}
    await pages.StateStream(page.server.collector)(scope, receive, send)
    assert not page.server.recent.is_open
