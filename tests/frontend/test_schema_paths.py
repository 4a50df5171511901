"""Schemas that cannot be followed, in every API: refused by the path in the client's schema."""

from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from tandem.grammar.compiled import load_tokenizer
from tandem.grammar.source import tried_source
from tests.frontend.frontend_stack import TEMPLATE as PLAIN
from tests.frontend.frontend_stack import Stack, answer_with, byte_level_tokenizer
from tests.frontend.grammar_worker import TEMPLATE, GrammarWorker, join
from tests.frontend.test_single_fields import post

CODER = TEMPLATE.replace("<tool_call>", "<tool_call><function=")


def strict_tool(parameters: object) -> dict[str, dict[str, Any]]:
    function = {"name": "f", "parameters": parameters, "strict": True}
    given = {"name": "f", "input_schema": parameters, "strict": True}
    hosted = {"type": "web_search", "name": "w"}
    return {
        "/v1/chat/completions": {"tools": [hosted, {"type": "function", "function": function}]},
        "/v1/responses": {"tools": [hosted, {"type": "function", **function}]},
        "/v1/messages": {"tools": [hosted, given]},
    }


def form(schema: object) -> dict[str, dict[str, Any]]:
    answer = {"type": "json_schema", "name": "s", "schema": schema}
    return {
        "/v1/chat/completions": {
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}
        },
        "/v1/responses": {"text": {"format": answer}},
        "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }


PLACES = {
    "/v1/chat/completions": ("tools[1].function.parameters", "response_format.json_schema.schema"),
    "/v1/responses": ("tools[1].parameters", "text.format.schema"),
    "/v1/messages": ("tools[1].input_schema", "output_config.format.schema"),
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> LLTokenizer:
    path = tmp_path / "tokenizer.json"
    byte_level_tokenizer().save(str(path))
    return load_tokenizer(path, byte_level_tokenizer().get_vocab_size(), (0,))


@pytest.mark.parametrize("template", [TEMPLATE, CODER, PLAIN], ids=["hermes", "coder", "plain"])
async def test_a_schema_that_cannot_be_followed_is_refused_by_its_path_in_every_api(
    tokenizer: LLTokenizer, template: str
) -> None:
    async def compile_first(request: Any, *others: Any) -> None:
        tried_source(request.grammar, tokenizer)
        await answer_with("{}")(request, *others)

    schema = {"type": "object", "properties": {"p": {"type": "number", "not": {}}}}
    recursive = {
        "type": "object",
        "properties": {"q": {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/n"}]}},
        "$defs": {"n": {"properties": {"p": {"items": {"contains": {}}}}}},
    }
    good = {"type": "object", "properties": {"q": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    async with Stack(num_workers=0) as stack:
        await join(stack, GrammarWorker, template)
        stack.worker.script = compile_first
        for path, places in PLACES.items():
            for make, place in zip((strict_tool, form), places, strict=True):
                if make is strict_tool and template is PLAIN:
                    continue
                for given, where in (
                    (schema, ".properties.p.not"),
                    (recursive, ".$defs.n.properties.p.items.contains"),
                    (good, ""),
                ):
                    response = await post(stack, path, make(given)[path])
                    if not where:
                        assert response.status_code == 200, response.text
                        continue
                    assert response.status_code == 400, response.text
                    message = response.json()["error"]["message"]
                    assert message == f"`{place}{where}`: not supported"
