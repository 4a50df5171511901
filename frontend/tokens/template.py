"""The chat template of a model: messages to one prompt, within a time and a length."""

import datetime
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from tandem.frontend.tokens.template_rules import work
from tandem.frontend.tokens.template_sandbox import WorkSandbox
from tandem.frontend.tokens.template_work import TooMuchWorkError
from tandem.runtime.errors import InvalidRequestError, ModelError

_MAX_SOURCE_CHARACTERS = 1024 * 1024
_MAX_TIME_FORM = 256  # characters; a result has up to 256 times as many


class TemplateTimeError(InvalidRequestError):
    """The template did not end within its time."""


class ChatTemplate:
    """A compiled template, in a sandbox that bounds time and memory of every operation.

    Raises ModelError for one that is not valid.
    """

    def __init__(self, source: str) -> None:
        if len(source) > _MAX_SOURCE_CHARACTERS:
            raise ModelError(f"the chat template has over {_MAX_SOURCE_CHARACTERS} characters")
        environment = WorkSandbox(
            {"tojson": _to_json},
            {"raise_exception": _raise_exception, "strftime_now": _strftime_now},
            [_Generation, "jinja2.ext.loopcontrols"],
        )
        try:
            self._template = environment.template_of(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template: {error}") from error
        self._template.globals = dict(self._template.globals)  # every render copies them

    def render(self, variables: Mapping[str, Any], max_characters: int, limit_s: float) -> str:
        """Return the rendered text, which may be cut when it has more than `max_characters`.

        Raises InvalidRequestError when the template fails, TemplateTimeError after `limit_s` of
        this thread's CPU time, or before it does more work than that.
        """
        context = self._template.new_context(dict(variables))
        parts: list[str] = []
        num_characters = 0
        work.begin(limit_s, variables)
        try:
            for part in self._template.root_render_func(context):
                parts.append(part)
                num_characters += len(part)
                if num_characters > max_characters:
                    break
        except TooMuchWorkError:
            raise TemplateTimeError(
                f"the chat template takes over {limit_s:g} s, or too much memory, for these "
                "messages",
                param="messages",
            ) from None
        except Exception as error:  # of any kind: a template is a program of the model's author
            raise InvalidRequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        finally:
            work.end()
        return "".join(parts)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training. It has no effect here."""

    tags = {"generation"}  # noqa: RUF012, the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_TIME_FORM:
        raise TooMuchWorkError
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
