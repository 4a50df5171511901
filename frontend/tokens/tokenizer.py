"""The tokenizer and the chat template of a model, from the files of its folder."""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from tandem.frontend.parsers.formats import reasoning_format_of, tool_format_of
from tandem.frontend.tokens.detokenizer import DetokenizerFactory
from tandem.frontend.tokens.template import ChatTemplate
from tandem.runtime.errors import InvalidRequestError, ModelError
from tandem.runtime.sampling_defaults import sampling_defaults

_SHORT_CHARACTERS = 4096
_END_OF_TEXT = "<|endoftext|>"


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
        sources = _template_sources(files, config)
        self._template = ChatTemplate(sources["default"]) if "default" in sources else None
        self._tool_template = (
            ChatTemplate(sources["tool_use"]) if "tool_use" in sources else self._template
        )
        self.chat_template = sources.get("tool_use") or sources.get("default") or ""
        self.tool_format = tool_format_of(self.chat_template)
        self.reasoning_format = reasoning_format_of(self.chat_template)
        self.sampling = sampling_defaults(files)
        self.longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)  # characters
        self.detokenizers = DetokenizerFactory(self._tokenizer)

    def render(
        self,
        messages: list[dict[str, Any]],
        extra: Mapping[str, Any],
        max_characters: int,
        limit_s: float,
        *,
        add_generation_prompt: bool = True,
        continues_last: bool = False,
    ) -> str:
        """Return the conversation as one prompt, which ends where the assistant begins.

        With `continues_last` it ends with the content of the last message.

        A text of over `max_characters` may be cut. Raises InvalidRequestError when the model has
        no template or its template fails, TemplateTimeError after `limit_s` of CPU time.
        """
        template = self._tool_template if extra.get("tools") else self._template
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        if extra.get("tools") and "tools" not in self.chat_template:
            raise InvalidRequestError(
                "the model's chat template takes no `tools`; `tool_choice` none leaves them out",
                param="tools",
            )
        variables = {**extra, **self._special_tokens, "messages": messages}
        variables["add_generation_prompt"] = add_generation_prompt
        text = template.render(variables, max_characters, limit_s)
        return _without_end(text, messages[-1]["content"] or "") if continues_last else text

    def encode(self, text: str, *, is_chat: bool) -> list[int]:
        """Return the token ids of a prompt. A rendered chat has its special tokens already.

        Other threads run while a long text is tokenized: `encode_batch_fast` releases Python's
        lock, which `encode` holds to its end.
        """
        if len(text) <= _SHORT_CHARACTERS:
            encoding = self._tokenizer.encode(text, add_special_tokens=not is_chat)
        else:
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=not is_chat)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens, special tokens included."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    @property
    def special_tokens(self) -> dict[str, int]:
        """The special tokens and their ids."""
        return self.detokenizers.special_tokens

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """Return the entries of tokens in the vocabulary; empty for one that has none."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    @property
    def start_token_id(self) -> int | None:
        """The token that stands for the start of a text; None where the model has none.

        A model without one was trained on texts that follow each other after an end token.
        """
        names = self._special_tokens
        for token in (names.get("bos_token"), _END_OF_TEXT, names.get("eos_token")):
            token_id: int | None = self._tokenizer.token_to_id(token) if token else None
            if token_id is not None:
                return token_id
        return None


def _without_end(text: str, content: str) -> str:
    """Return a rendered chat up to the content of its last message."""
    content = content.strip()
    start = text.rfind(content)
    if start < 0:
        raise InvalidRequestError(
            "the chat template does not show the last message as it is, so it cannot be continued",
            param="continue_final_message",
        )
    return text[: start + len(content)]


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
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name}: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{name} is not a JSON object")
    return loaded


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_sources(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name. One of them may be for chats with tools only."""
    if "chat_template.jinja" in files:
        return {"default": files["chat_template.jinja"].decode()}
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        return {
            name: source
            for name in ("default", "tool_use")
            if isinstance(source := named.get(name), str)
        }
    return {"default": template} if isinstance(template, str) else {}
