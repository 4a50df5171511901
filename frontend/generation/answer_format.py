"""The format of a chat's answer: the parser that reads it, and the grammar that it follows."""

import re

import msgspec

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.catalog.catalog import TokenModel
from tandem.frontend.chat.constraints import Constraint, excluding
from tandem.frontend.chat.requests import ChatRequest, CompletionRequest
from tandem.frontend.config import FrontendConfig
from tandem.frontend.generation.call_grammar import AnswerGrammar
from tandem.frontend.parsers.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
)
from tandem.frontend.parsers.output_format import OutputFormat, output_format
from tandem.frontend.parsers.pieces import OutputParser
from tandem.frontend.parsers.plain import PlainParser, WithoutReasoning
from tandem.frontend.parsers.streaming import StreamingParser
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.cluster_messages import AnswerRules
from tandem.runtime.wire.request_bounds import check_grammar_size

# A schema within a Lark grammar has a line; the path leads to the fault in the schema.
_GRAMMAR_FIELD = re.compile(r"grammar(\[(?P<line>\d+)\])?(?P<path>.*)", re.DOTALL)
_NUM_LAST_TOKENS = 16  # of a prompt, which may open the reasoning


class AnswerFormat(msgspec.Struct, frozen=True):
    """The format of the answers to one body. Without `output` all of their text is content."""

    output: OutputFormat | None = None
    starts_reasoning: bool = False
    constraint: Constraint | None = None

    def new_parser(self, body: ChatRequest) -> OutputParser:
        """Return a parser of one choice of a chat."""
        parser = self._new_parser(body)
        return WithoutReasoning(parser) if body.hides_reasoning else parser

    def _new_parser(self, body: ChatRequest) -> OutputParser:
        if self.output is None:
            return PlainParser()
        functions = [each for _, each in body.chosen.functions]
        return StreamingParser(
            self.output,
            starts_reasoning=self.starts_reasoning,
            schemas={each.name: each.parameters for each in functions if each.parameters},
            max_calls=1 if body.parallel_tool_calls is False else None,
            only_calls=body.chosen.mode == "required",
        )

    def translated(self, error: InvalidRequestError) -> InvalidRequestError:
        """Return a worker's error about the grammar with the field that it comes from."""
        found = _GRAMMAR_FIELD.fullmatch(error.param or "")
        if found is None or self.constraint is None:
            return error
        field = self.constraint.field_of(found["line"], found["path"])
        return InvalidRequestError(f"`{field}`: {error.message}", param=field)


def answer_format(
    body: ChatRequest | CompletionRequest,
    model: TokenModel,
    config: FrontendConfig,
    prompt: list[int],
    ignored: Ignored,
) -> AnswerFormat:
    """Return the format of the answer to a prompt. Raises InvalidRequestError naming a field."""
    if isinstance(body, ChatRequest):
        found = _of_chat(body, model, config, prompt)
    else:
        found = AnswerFormat(constraint=body.constraint())
    if found.constraint is not None:
        for field in found.constraint.unkept:
            ignored.add(field)
        if not model.card.supports_grammar:
            raise InvalidRequestError(
                f"`{found.constraint.field}`: the workers of model {model.card.name!r} do not "
                "support structured output",
                param=found.constraint.field,
            )
        try:
            check_grammar_size(found.constraint.grammar)
        except InvalidRequestError as error:
            raise found.translated(error) from error
    return found


def _of_chat(
    body: ChatRequest, model: TokenModel, config: FrontendConfig, prompt: list[int]
) -> AnswerFormat:
    name, text, rules = model.card.name, model.text, model.card.answers
    thinks_by = (
        config.format_of(config.reasoning_formats, name)
        or rules.reasoning_format
        or text.reasoning_format
    )
    reasoning = REASONING_FORMATS.get(thinks_by)
    constraint = body.constraint()
    tools: ToolFormat | None = None
    calls_by = "none"
    if body.chosen.functions:
        calls_by = (
            config.format_of(config.tool_formats, name) or rules.tool_format or text.tool_format
        )
        tools = TOOL_FORMATS.get(calls_by)
        if tools is None:
            raise InvalidRequestError(
                f"`{body.origins.listed}`: the format in which model {name!r} calls tools is not "
                "known; `frontend.tool_formats` can name it",
                param=body.origins.listed,
            )
    if reasoning is None and tools is None:
        return AnswerFormat(constraint=constraint)
    if constraint is not None and constraint.has_rules and tools is None:
        return AnswerFormat(constraint=constraint)  # its rules are those of the whole text
    is_open = reasoning is not None and _is_open(model, prompt, reasoning)
    field = _calls_field(body, tools) or _guided_field(body, tools, model)
    if field or constraint is not None:
        grammar = AnswerGrammar(text.special_tokens, _schema_fields(body))
        field = field or (constraint.field if constraint else "")
        try:
            answer = _answer(body, grammar, tools, reasoning, constraint, calls_by, rules)
        except RecursionError:
            raise invalid_field(field, "has a schema that is nested too deeply") from None
        source = grammar.source(answer, reasoning, is_open=is_open)
        unkept = grammar.unkept + (constraint.unkept if constraint else [])
        constraint = Constraint(field, source, places=grammar.places, unkept=unkept)
    return AnswerFormat(output_format(thinks_by, calls_by), is_open, constraint)


def _schema_fields(body: ChatRequest) -> dict[str, str]:
    """Return the field of each function's schema, by the name of the function."""
    name = body.origins.parameters
    return {each.name: f"{field}.{name}" for field, each in body.chosen.functions}


def _calls_field(body: ChatRequest, tools: ToolFormat | None) -> str:
    """Return the field that makes calls follow a grammar; empty if there is none."""
    if tools is None:
        return ""
    chosen = body.chosen
    if chosen.mode == "required":
        return body.origins.choice
    strict = [field for field, each in chosen.functions if each.strict]
    return f"{strict[0]}.strict" if strict else ""


def _guided_field(body: ChatRequest, tools: ToolFormat | None, model: TokenModel) -> str:
    """Return the field whose calls the model's workers want to follow a grammar, as they can."""
    scope = model.card.answers.guided_calls
    is_wanted = scope == "always" or (scope == "auto" and body.parallel_tool_calls is False)
    is_possible = tools is not None and bool(tools.call[0]) and model.card.supports_grammar
    return body.origins.listed if is_wanted and is_possible else ""


def _answer(
    body: ChatRequest,
    grammar: AnswerGrammar,
    tools: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    constraint: Constraint | None,
    calls_by: str,
    rules: AnswerRules,
) -> str:
    """Add the rules of the answer after its reasoning. Returns the first."""
    if tools is None:
        assert constraint is not None
        return grammar.body(constraint.grammar, reasoning, constraint.places.get(0, ""))
    if not tools.call[0]:
        field = _calls_field(body, tools) or body.origins.listed
        raise InvalidRequestError(
            f"`{field}`: calls in the format {calls_by!r} cannot follow a grammar", param=field
        )
    chosen, is_one = body.chosen, body.parallel_tool_calls is False
    functions = [each for _, each in chosen.functions]
    if chosen.called is not None:
        named = [each for each in functions if each.name == chosen.called]
        return grammar.calls(tools, named, one=True)
    if chosen.mode == "required":
        return grammar.calls(tools, functions, one=is_one)
    if not rules.are_calls_strict:
        grammar.free = {each.name for each in functions if not each.strict}
    if constraint is None:
        return grammar.text_and_calls(tools, functions, reasoning, one=is_one)
    if constraint.has_rules:
        raise excluding(body.origins.listed, constraint.field)
    calls = grammar.calls(tools, functions, one=is_one)
    text = grammar.body(constraint.grammar, reasoning, constraint.places.get(0, ""))
    return f"({calls} | {text})"


def _is_open(model: TokenModel, prompt: list[int], reasoning: ReasoningFormat) -> bool:
    """Return True if the answer to a prompt begins within its reasoning."""
    end = model.text.decode(prompt[-_NUM_LAST_TOKENS:]).rstrip()
    if model.card.answers.reasons_first:
        return not end.endswith(reasoning.end.rstrip())
    return end.endswith(reasoning.begin.rstrip())
