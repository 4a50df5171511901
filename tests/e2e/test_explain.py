"""`tandem explain` of requests whose places were decided by the default policy."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from tandem.launch.cluster.explain import explain, run_explain
from tandem.runtime.errors import NotFoundError
from tandem.runtime.wire.explain_messages import PromptExplanation
from tests.config.configs import config_of
from tests.e2e.cluster import Answer, Cluster

LONG = 1200  # tokens; disagg.max_local_prefill_length is 1000
PATIENCE_S = 240.0
ID_HEADER = "x-tandem-request-id"


def addresses(cluster: Cluster) -> list[str]:
    named = {"nats_url": cluster.nats.url, "etcd_endpoints": cluster.etcd.url, "namespace": "test"}
    return [f"--runtime.{name}={value}" for name, value in named.items()]


async def told(cluster: Cluster, answer: Answer) -> list[PromptExplanation]:
    return await explain(config_of(*addresses(cluster)), answer.headers[ID_HEADER])


async def test_a_request_has_every_place_that_was_considered_and_what_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(1)
    async with asyncio.timeout(PATIENCE_S), Cluster(tmp_path) as cluster:
        await cluster.start_all(1, 1)
        instances = {each.instance_id: each.component for each in await cluster.instances()}
        [decoder] = (name for name, component in instances.items() if component == "decode")
        [prefiller] = (name for name, component in instances.items() if component == "prefill")

        async def long_prompt() -> tuple[Answer, PromptExplanation]:
            answer = await cluster.complete([draw.randrange(3, 1000) for _ in range(LONG)])
            [found] = await told(cluster, answer)
            return answer, found

        answer, found = await long_prompt()
        while not found.routed or len(found.considered) < 2:  # reports of loads are to come
            answer, found = await long_prompt()
        [routed] = found.routed
        assert routed.instance_id == found.decode_instance == decoder
        assert routed.fits and 0 < routed.first_token_ms <= routed.cost_ms
        assert (found.num_prompt_tokens, found.outcome) == (LONG, "finished")
        here, there = found.considered
        assert (here.place, here.instance_id) == ("local", found.decode_instance)
        assert (there.place, there.instance_id) == ("remote", prefiller)
        for place in (here, there):
            parts = place.wait_ms + place.compute_ms + place.transfer_ms
            assert 0 < parts == pytest.approx(place.first_token_ms)
        assert found.last_place == answer.place
        assert found.last_reason == answer.headers["x-tandem-prefill-reason"]
        assert found.timeline_ms["first_token"] > 0

        several = await cluster.complete("Once", n=2, max_tokens=2)
        both = await told(cluster, several)
        assert [each.cause for each in both] == ["short"] * 2  # no other place is predicted
        assert [len(each.considered) for each in both] == [1, 1]

        config, request_id = config_of(*addresses(cluster)), answer.headers[ID_HEADER]
        await asyncio.to_thread(run_explain, config, request_id, as_json=False)
        text = capsys.readouterr().out
        assert f"decided: {found.place} ({found.cause}): {found.reason}" in text
        assert prefiller[:8] in text and decoder[:8] in text
        await asyncio.to_thread(run_explain, config, request_id, as_json=True)
        [same] = json.loads(capsys.readouterr().out)
        assert [each["instance_id"] for each in same["routed"]] == [decoder]

        with pytest.raises(NotFoundError, match=r"no decode worker .*1 asked.* 'nobody'"):
            await explain(config, "nobody")
