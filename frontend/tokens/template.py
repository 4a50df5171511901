"""The chat template of a model: messages to one prompt, within a time and a length."""

import datetime
import json
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from tandem.runtime.errors import InvalidRequestError, ModelError

_MAX_SOURCE_CHARACTERS = 1024 * 1024
_CHECK_TIME = "_tandem_check_time"  # a filter, which is called without the sandbox's own checks
_END_S = "_tandem_end_s"  # a variable


class TemplateTimeError(InvalidRequestError):
    """The template did not end within its time."""


class _LateError(Exception):
    """The template is over its time."""


class ChatTemplate:
    """A compiled template, in Jinja's sandbox. Raises ModelError for one that is not valid.

    Every pass of a loop and every call of a macro checks the time, so that none of them runs on.
    """

    def __init__(self, source: str) -> None:
        if len(source) > _MAX_SOURCE_CHARACTERS:
            raise ModelError(f"the chat template has over {_MAX_SOURCE_CHARACTERS} characters")
        if _END_S in source:  # it could give itself more time
            raise ModelError(f"the chat template uses the name {_END_S}")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.filters[_CHECK_TIME] = _check_time
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(_with_checks(environment.parse(source)))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template: {error}") from error
        self._template.globals = dict(self._template.globals)  # every render copies them

    def render(self, variables: Mapping[str, Any], max_characters: int, limit_s: float) -> str:
        """Return the rendered text, which may be cut when it has more than `max_characters`.

        Raises InvalidRequestError when the template fails, TemplateTimeError after `limit_s` of
        this thread's CPU time.
        """
        end_s = time.thread_time() + limit_s
        context = self._template.new_context({**variables, _END_S: end_s})
        parts: list[str] = []
        num_characters = 0
        try:
            for part in self._template.root_render_func(context):
                parts.append(part)
                num_characters += len(part)
                if num_characters > max_characters:
                    break
        except _LateError:
            raise TemplateTimeError(
                f"the chat template took over {limit_s:g} s for these messages", param="messages"
            ) from None
        except Exception as error:  # of any kind: a template is a program of the model's author
            raise InvalidRequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return "".join(parts)


def _with_checks(template: jinja2.nodes.Template) -> jinja2.nodes.Template:
    """Return the parsed template with a check of the time in every loop and macro."""
    loops: list[jinja2.nodes.For | jinja2.nodes.Macro] = [*template.find_all(jinja2.nodes.For)]
    for node in [*loops, *template.find_all(jinja2.nodes.Macro)]:
        end_s = jinja2.nodes.Name(_END_S, "load", lineno=node.lineno)
        check = jinja2.nodes.Filter(end_s, _CHECK_TIME, [], [], None, None, lineno=node.lineno)
        node.body.insert(0, jinja2.nodes.ExprStmt(check, lineno=node.lineno))
    return template


def _check_time(end_s: float) -> None:
    if time.thread_time() > end_s:
        raise _LateError


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training. It has no effect here."""

    tags = {"generation"}  # noqa: RUF012, the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON that is not escaped for HTML, unlike the one of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
