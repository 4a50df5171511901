"""The tokenizer and the chat template of a model, from the files of its folder."""

import asyncio
import datetime
import json
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

from tandem.frontend.tokens.detokenizer import DetokenizerFactory
from tandem.runtime.errors import InvalidRequestError, ModelError

# A shorter text is tokenized in less time than a thread takes to answer.
_INLINE_CHARACTERS = 4096


class ModelText:
    """Text to token ids and back, for one model.

    Raises ModelError naming the file at fault.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._tokenizer = _load_tokenizer(files)
        config = _load_json(files, "tokenizer_config.json")
        self._special_tokens = {
            name: text
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (text := _token_text(config.get(name))) is not None
        }
        source = _template_source(files, config)
        self._template = None if source is None else _compile(source)
        self.detokenizers = DetokenizerFactory(self._tokenizer)

    def render(self, messages: list[dict[str, str]], extra: Mapping[str, Any]) -> str:
        """Return the conversation as one prompt, which ends where the assistant begins.

        Raises InvalidRequestError when the model has no template or its template fails.
        """
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        variables = {**extra, **self._special_tokens, "messages": messages}
        try:
            return self._template.render(**variables, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise InvalidRequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error

    async def encode(self, text: str, *, is_chat: bool, executor: Executor) -> list[int]:
        """Return the token ids of a prompt. A rendered chat has its special tokens already."""
        if len(text) <= _INLINE_CHARACTERS:
            return self._encode(text, not is_chat)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(executor, self._encode, text, not is_chat)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    @property
    def bos_token_id(self) -> int | None:
        """The first token of every text; None where the model has none."""
        token = self._special_tokens.get("bos_token")
        token_id: int | None = None if token is None else self._tokenizer.token_to_id(token)
        return token_id


def _load_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    data = files.get("tokenizer.json")
    if data is None:
        raise ModelError("the model has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        loaded = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise ModelError(f"{name}: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{name} is not a JSON object")
    return loaded


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_source(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {entry.get("name"): entry.get("template") for entry in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None


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


def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(f"the chat template: {error}") from error
