"""What a worker says of its model's answers, and what a frontend makes of it."""

import json
from typing import Any

import pytest

from tandem.frontend.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError
from tandem.runtime.wire.cluster_messages import AnswerRules
from tandem.sdk import Context, EngineConfig, GenerateRequest
from tandem.sdk.dynamo import worker_config
from tandem.sdk.engine import answer_names
from tandem.sdk.engine.worker_config import WorkerConfig
from tests.sdk.engine.engine_stack import Chunks, ToyEngine, config_of
from tests.sdk.worker.model_stack import bundled_tokens, with_engine

# It shows neither the format of calls nor that of reasoning.
TEMPLATE = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
CALL = {"name": "now", "arguments": {"place": "Paris"}}


class Speaking(ToyEngine):
    """Answers with one text."""

    def __init__(self, text: str, **fields: Any) -> None:
        super().__init__()
        self.token_ids, self.fields = bundled_tokens(text), fields

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="tandem-tiny", served_model_name="toy", **self.fields)

    async def generate(self, request: GenerateRequest, context: Context) -> Chunks:
        self.requests.append(request)
        yield {"token_ids": self.token_ids, "index": 0, "finish_reason": "stop"}


@pytest.fixture
def own_template(tmp_path: Any) -> str:
    path = tmp_path / "own.jinja"
    path.write_text(TEMPLATE)
    return str(path)


async def answer_of_engine(
    engine: ToyEngine, config: WorkerConfig, cluster: RuntimeConfig, **fields: Any
) -> dict[str, Any]:
    async with with_engine(engine, config, cluster) as stack:
        answer = await stack.chat("toy", **fields)
    choice: dict[str, Any] = answer["choices"][0]
    return choice


@pytest.mark.parametrize(("names", "formats"), [
    (answer_names.TOOL_PARSERS, TOOL_FORMATS), (answer_names.REASONING_PARSERS, REASONING_FORMATS),
])  # fmt: skip
def test_every_name_of_a_parser_is_of_a_format_that_the_frontend_has(
    names: dict[str, str], formats: dict[str, Any]
) -> None:
    assert set(names.values()) == {*formats, "none"}
    assert names.keys() >= answer_names.REASONS_FIRST or formats is TOOL_FORMATS


@pytest.mark.parametrize(
    ("name", "value", "format"),
    [
        ("tool_call_parser", "functiongemma", "function_gemma"),
        ("tool_call_parser", "granite4", "hermes"),
        ("tool_call_parser", "mimo", "qwen3_coder"),
        ("reasoning_parser", "mimo", "think"),
        ("reasoning_parser", "kimi_k2", "think"),
        ("reasoning_parser", "minimax_m2", "think"),
        ("reasoning_parser", "openai_gptoss", "harmony"),
    ],
)
def test_names_of_vllm_stand_for_the_formats_of_their_models(
    name: str, value: str, format: str
) -> None:
    rules = config_of(**{name: value}).answer_rules()
    assert format in (rules.tool_format, rules.reasoning_format)
    assert rules.reasons_first == (value == "minimax_m2")


async def test_the_calls_and_the_reasoning_of_an_engine_are_read_by_its_parsers(
    quick: RuntimeConfig, own_template: str
) -> None:
    text = f"<think>I call.</think><tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    config = config_of(
        custom_jinja_template=own_template, tool_call_parser="hermes", reasoning_parser="qwen3"
    )
    choice = await answer_of_engine(Speaking(text), config, quick, tools=[TOOL])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "I call."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "now"
    assert json.loads(call["function"]["arguments"]) == CALL["arguments"]


async def test_answers_of_a_model_that_reasons_first_need_no_mark(
    quick: RuntimeConfig, own_template: str
) -> None:
    config = config_of(custom_jinja_template=own_template, reasoning_parser="deepseek_r1")
    choice = await answer_of_engine(Speaking("Hm.</think>Yes."), config, quick)
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["content"] == "Yes."


@pytest.mark.parametrize("excludes", [True, False])
async def test_tools_that_may_not_be_called_are_in_the_prompt_where_the_worker_says_so(
    excludes: bool, quick: RuntimeConfig, own_template: str
) -> None:
    engine = Speaking("No.")
    config = config_of(
        custom_jinja_template=own_template, exclude_tools_when_tool_choice_none=excludes
    )
    await answer_of_engine(engine, config, quick, tools=[TOOL], tool_choice="none")
    num_shown = len(engine.requests[0]["token_ids"])
    assert (num_shown < len(bundled_tokens("now parameters object type"))) is excludes


@pytest.mark.parametrize(
    ("scope", "schema", "fields", "is_guided"),
    [
        ("auto", "auto", {}, False),
        ("auto", "auto", {"parallel_tool_calls": False}, True),
        ("always", "auto", {}, True),
        ("always", "strict", {}, True),
        ("always", "auto", {"tool_choice": "none"}, False),
    ],
)
async def test_calls_follow_a_grammar_where_the_worker_wants_it(
    scope: str, schema: str, fields: dict[str, Any], is_guided: bool, quick: RuntimeConfig
) -> None:
    engine = Speaking("No.", supports_grammar=True)
    config = config_of(
        tool_call_parser="hermes",
        structural_tag_mode="on",
        structural_tag_scope=scope,
        structural_tag_schema=schema,
    )
    parameters = {"type": "object", "properties": {"place": {"const": "PARIS"}}}
    tool = {"type": "function", "function": {"name": "now", "parameters": parameters}}
    await answer_of_engine(engine, config, quick, tools=[tool], **fields)
    grammar = engine.requests[0]["sampling_options"]["grammar"]
    assert (grammar is not None) is is_guided
    if grammar is not None:
        assert ("PARIS" in grammar["source"]) is (schema == "strict")


async def test_an_engine_without_grammars_serves_calls_that_follow_none(
    quick: RuntimeConfig,
) -> None:
    config = config_of(structural_tag_mode="on", structural_tag_scope="always")
    choice = await answer_of_engine(Speaking("No."), config, quick, tools=[TOOL])
    assert choice["message"]["content"] == "No."


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_call_parser", "hermse"),
        ("reasoning_parser", ["think"]),
        ("structural_tag_mode", "perhaps"),
        ("structural_tag_scope", "never"),
        ("structural_tag_schema", {}),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_are_known(field: str, value: Any) -> None:
    fields = {"structural_tag_mode": "on", field: value}
    with pytest.raises(ConfigError, match=rf"WorkerConfig\.{field}: .* known are ") as caught:
        config_of(**fields).check()
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("tag", "rules"),
    [
        (None, AnswerRules()),
        (False, AnswerRules()),
        (True, AnswerRules(guided_calls="always")),
        ({"scope": "auto"}, AnswerRules(guided_calls="auto")),
        ({"schema": "strict"}, AnswerRules(guided_calls="always", are_calls_strict=True)),
    ],
)
def test_the_later_form_of_structural_tags_says_the_same(tag: Any, rules: AnswerRules) -> None:
    config = worker_config.WorkerConfig("pipe", structural_tag=tag)
    config.check()
    assert config.answer_rules() == rules


def test_a_part_of_structural_tags_that_tandem_does_not_have_is_refused() -> None:
    tag = {"reasoning_boundary": "backend"}
    with pytest.raises(ConfigError, match="structural_tag: 'reasoning_boundary' is not supported"):
        worker_config.WorkerConfig("pipe", structural_tag=tag).check()
