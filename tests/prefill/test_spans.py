"""The OpenTelemetry span of a ticket at a prefill worker."""

from typing import Any

import msgspec
import pytest

from tests.handoff_peer import fresh_prompt
from tests.prefill.decode_peer import Stage
from tests.services import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # as the stage's


async def test_a_tickets_span_is_below_that_of_its_decode_worker(
    stage: Stage, exported: Any
) -> None:
    offer = stage.prepare(fresh_prompt(9))
    trace = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    offer.job = msgspec.structs.replace(offer.job, trace=trace)
    await stage.publish(offer)
    await stage.text(offer)

    def named() -> dict[str, Any]:
        return {each.name: each for each in exported.get_finished_spans()}

    await eventually(lambda: "tandem.prefill" in named())
    span = named()["tandem.prefill"]
    assert f"{span.context.trace_id:032x}" == "ab" * 16
    assert span.parent.span_id == int("cd" * 8, 16)
    assert span.attributes["tandem.end"] == "delivered"
    assert named()["compute"].parent.span_id == span.context.span_id
