"""One trace from client to prefill worker, over handoffs, fallbacks and migrations."""

import asyncio
import secrets
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tandem.runtime.address import new_id
from tests.e2e.cluster import Answer, Cluster
from tests.runtime.tracing.otlp_collector import Collector

pytest.importorskip("opentelemetry.exporter.otlp.proto.common", reason="the extra otel is missing")

NUM_REQUESTS = 20
PROMPT = "Tell me a story about a fox and an old house. "
INTERVAL_ENDS = {"queue": "claimed", "exposed transfer": "landed", "verification": "verified"}
FLAGS = ("--disagg.claim_timeout_ms=2000", "--runtime.drain_timeout_s=0.1")


async def ask(cluster: Cluster, trace_id: str, place: str, max_tokens: int = 8) -> Answer:
    return await cluster.chat(
        PROMPT,
        max_tokens=max_tokens,
        ignore_eos=True,
        cache_salt=new_id(),
        headers={
            "traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01",
            "x-tandem-prefill": place,
            "x-tandem-timeline": "true",
        },
    )


async def ask_many(cluster: Cluster, place: str, number: int = NUM_REQUESTS) -> dict[str, Answer]:
    trace_ids = [secrets.token_hex(16) for _ in range(number)]
    answers = await asyncio.gather(*(ask(cluster, each, place) for each in trace_ids))
    return dict(zip(trace_ids, answers, strict=True))


async def migrated(cluster: Cluster) -> dict[str, Answer]:
    """Answers whose decode worker leaves in the middle of them."""
    trace_ids = [secrets.token_hex(16) for _ in range(4)]
    asking = [asyncio.create_task(ask(cluster, each, "local", 1500)) for each in trace_ids]
    while not any(each.load.num_running for each in await cluster.statuses("decode")):
        await asyncio.sleep(0.01)
    pids = {each.instance.pid for each in await cluster.statuses("decode") if each.load.num_running}
    name = next(n for n, child in cluster.children.items() if child.pid in pids)
    cluster.send_signal(name, signal.SIGTERM)
    return dict(zip(trace_ids, await asyncio.gather(*asking), strict=True))


@pytest.mark.slow
async def test_every_request_is_one_trace_with_the_times_of_its_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Collector() as collector, Cluster(tmp_path) as cluster:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        await cluster.start_all(1, 2, *FLAGS)
        handed = await ask_many(cluster, "remote")
        cluster.send_signal("prefill0", signal.SIGSTOP)
        fallen = await ask_many(cluster, "remote", 4)
        cluster.send_signal("prefill0", signal.SIGCONT)
        moved = await migrated(cluster)
        answers = handed | fallen | moved
        for name in list(cluster.children):
            await cluster.end(name)  # sends its last spans
        spans: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        for span in collector.spans:
            spans[span.trace_id.hex()][span.name].append(span)
    for trace_id, answer in answers.items():
        assert answer.status == 200, answer.body
        assert answer.headers["traceresponse"].split("-")[1] == trace_id
        names = spans[trace_id].keys()
        assert {f"chat {cluster.model_name}", "tandem.call", "tandem.decode"} <= names
    assert set(spans) >= set(answers)
    for trace_id, answer in handed.items():
        assert answer.place == "remote", answer.headers["x-tandem-prefill-reason"]
        assert "tandem.prefill" in spans[trace_id]
        check_times(spans[trace_id], answer)
    for trace_id in fallen:
        found = spans[trace_id]
        assert found["tandem.handoff"][0].span_id in links(found["prefill"])
    num_links = sum(len(links(spans[trace_id]["tandem.call"])) for trace_id in moved)
    assert num_links > 0, "every answer was over before its worker left"


def check_times(spans: dict[str, list[Any]], answer: Answer) -> None:
    """Assert that intervals end within 1 ms of the timeline that the client got."""
    stages_ms = answer.body["choices"][0]["tandem"]["timeline_ms"]
    (decode,) = spans["tandem.decode"]
    for name, stage in INTERVAL_ENDS.items():
        (part,) = [each for each in spans[name] if each.parent_span_id == decode.span_id]
        end_ms = (part.end_time_unix_nano - decode.start_time_unix_nano) / 1e6
        assert end_ms == pytest.approx(stages_ms[stage], abs=1.0), name


def links(spans: list[Any]) -> set[bytes]:
    return {link.span_id for span in spans for link in span.links}
