"""The OpenTelemetry span of a request at a decode worker."""

from typing import Any

import pytest

from tests.decode.prefill_peer import PROMPT, Stage
from tests.services import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # as the stage's


async def test_a_ticket_takes_the_requests_span_along(stage: Stage, exported: Any) -> None:
    answer, work = await stage.handoff(PROMPT)
    await stage.deliver(work)
    await answer.whole()

    def named() -> dict[str, Any]:
        return {each.name: each for each in exported.get_finished_spans()}

    await eventually(lambda: "tandem.decode" in named())
    span = named()["tandem.decode"]
    handoff = named()["tandem.handoff"]
    _, trace_id, span_id, _ = work.job.trace["traceparent"].split("-")
    assert f"{span.context.trace_id:032x}" == trace_id
    assert f"{handoff.context.span_id:016x}" == span_id
    assert handoff.parent.span_id == span.context.span_id
    own = span.attributes
    assert own["tandem.place"] == "remote" and own["tandem.outcome"] == "finished"
    assert {"placement", "queue", "decode"} <= named().keys()
    for name in ("queue", "decode"):
        assert named()[name].parent.span_id == span.context.span_id
