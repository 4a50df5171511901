"""The span of a request at the frontend, over the calls of workers, to the client's header."""

import json
from pathlib import Path
from typing import Any

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import IncompleteError
from tandem.runtime.tracing.trace import trace_path
from tests.frontend.frontend_stack import MODEL, Stack
from tests.frontend.generation.cut_answers import Cut

TRACE_ID = "ab" * 16
HEADERS = {"traceparent": f"00-{TRACE_ID}-{'cd' * 8}-01"}


async def test_a_migrated_answer_is_one_trace_with_a_link(exported: Any, pair: Stack) -> None:
    Cut(pair, 2, IncompleteError("going"))
    response = await pair.chat(headers=HEADERS)
    assert response.status_code == 200, response.text
    spans = exported.get_finished_spans()
    assert {f"{each.context.trace_id:032x}" for each in spans} == {TRACE_ID}
    (request,) = [each for each in spans if each.name == f"chat {MODEL}"]
    lost, resumed = [each for each in spans if each.name == "tandem.call"]
    assert request.parent.span_id == int("cd" * 8, 16)
    assert lost.parent.span_id == resumed.parent.span_id == request.context.span_id
    assert [link.context.span_id for link in resumed.links] == [lost.context.span_id]
    named = {f"{lost.context.span_id:016x}", f"{resumed.context.span_id:016x}"}
    contexts = [context for worker in pair.workers for context in worker.contexts]
    assert {each.headers["traceparent"].split("-")[2] for each in contexts} == named
    expected = f"00-{TRACE_ID}-{request.context.span_id:016x}-01"
    assert response.headers["traceresponse"] == expected
    usage = response.json()["usage"]
    assert request.attributes["gen_ai.operation.name"] == "chat"
    assert request.attributes["gen_ai.request.model"] == MODEL
    assert request.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert request.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert request.attributes["http.response.status_code"] == 200


async def test_a_refused_request_has_a_span_and_its_header(exported: Any, pair: Stack) -> None:
    response = await pair.chat(messages=[], headers=HEADERS)
    assert response.status_code == 400
    (span,) = [each for each in exported.get_finished_spans() if each.name.startswith("chat")]
    assert span.attributes["error.type"] == "400"
    assert response.headers["traceresponse"].split("-")[1] == TRACE_ID


async def test_without_a_collector_the_frontend_writes_the_trace_file_alone(tmp_path: Path) -> None:
    runtime = RuntimeConfig(trace_file=str(tmp_path / "t.json"))
    async with Stack(runtime=runtime) as stack:
        response = await stack.chat(headers=HEADERS)
        assert "traceresponse" not in response.headers
        path = trace_path(str(tmp_path / "t.json"), "frontend", stack.server.instance_id)
    (request,) = [each for each in json.loads(path.read_text()) if each["name"] == "request"]
    assert request["args"]["trace_id"] == TRACE_ID
