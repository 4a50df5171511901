"""The tokenizer and the chat template of a model, from the files of its folder."""

import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tokenizers import Tokenizer

from tandem.frontend.parsers.formats import reasoning_format_of, tool_format_of
from tandem.frontend.tokens.chat_forms import as_parts, forms
from tandem.frontend.tokens.codec import Codec
from tandem.frontend.tokens.detokenizer import DetokenizerFactory
from tandem.frontend.tokens.folder_tokens import FolderTokens
from tandem.frontend.tokens.template import ChatTemplate, TemplateTimeError
from tandem.runtime.errors import InvalidRequestError, ModelError
from tandem.runtime.native import fault_of
from tandem.runtime.wire.sampling_defaults import sampling_defaults

_END_OF_TEXT = "<|endoftext|>"
_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+\w+(\.content|\[['\"]content['\"]\])")
_MARK = "TANDEM_CONTINUES_HERE "  # behind the content of a message that is continued

NUM_THREADS = 2  # of each model


class ModelText:
    """Text to token ids and back, for one model.

    Long texts are for `threads`, of which there are NUM_THREADS once they are needed: a tokenizer
    or a template that takes long holds up no other model. Raises ModelError naming the file at
    fault.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        tokenizer = _load_tokenizer(files)
        tokens = FolderTokens(files)
        tokens.add_to(tokenizer)
        self._tokenizer = Codec(tokenizer)
        self._special_tokens = tokens.named
        sources = _template_sources(files, tokens.config)
        self._template = ChatTemplate(sources["default"]) if "default" in sources else None
        self._tool_template = (
            ChatTemplate(sources["tool_use"]) if "tool_use" in sources else self._template
        )
        self.chat_template = sources.get("tool_use") or sources.get("default") or ""
        self._wants_parts = _wants_parts(self.chat_template)
        self.tool_format = tool_format_of(self.chat_template)
        self.reasoning_format = reasoning_format_of(self.chat_template)
        self.sampling = sampling_defaults(files)
        self.longest_token = self._tokenizer.longest_token  # characters
        self.is_quick = self._tokenizer.is_quick  # short texts may be tokenized on the event loop
        self.detokenizers = DetokenizerFactory(self._tokenizer)
        self.threads = ThreadPoolExecutor(NUM_THREADS, "tokenizer")

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

        The arguments of calls are text in `messages`. With `continues_last` the prompt ends with
        the content of the last message.

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
        if continues_last:
            marked = messages[-1] | {"content": messages[-1]["content"] + _MARK}
            messages = [*messages[:-1], marked]
        if self._wants_parts:
            messages = [each | {"content": as_parts(each["content"])} for each in messages]
        variables = {"documents": None, **self._special_tokens, **extra}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        variables.setdefault("tools", None)
        text = _rendered(template, variables, max_characters, limit_s)
        return _without_end(text) if continues_last and len(text) <= max_characters else text

    def encode(self, text: str, *, is_chat: bool, param: str = "prompt") -> list[int]:
        """Return the token ids of a prompt. A rendered chat has its special tokens already.

        Other threads run while a long text is tokenized. Raises InvalidRequestError naming `param`
        for a text that the tokenizer cannot take.
        """
        return self._tokenizer.encode(text, adds_special=not is_chat, param=param)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Return the token ids of a pair of texts, as the model's tokenizer joins them.

        The second value is the place of the second text's first token, or the number of tokens.
        """
        return self._tokenizer.encode_pair(first, second)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens, special tokens included."""
        return self._tokenizer.decode(token_ids, skips_special=False)

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


def _rendered(
    template: ChatTemplate, variables: dict[str, Any], max_characters: int, limit_s: float
) -> str:
    """Return the text in the first form that the template renders, else raise its first error."""
    end_s = time.thread_time() + limit_s
    refusal: InvalidRequestError | None = None
    for form in forms(variables):
        try:
            return template.render(form, max_characters, end_s - time.thread_time())
        except TemplateTimeError as error:
            raise TemplateTimeError(
                f"the chat template took over {limit_s:g} s for these messages", param="messages"
            ) from error
        except InvalidRequestError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _without_end(text: str) -> str:
    """Return a rendered chat up to the mark behind the content of its last message.

    A template that strips the content takes the space at the end of the mark away.
    """
    place = text.rfind(_MARK.rstrip())
    if place < 0:
        raise InvalidRequestError(
            "the chat template does not show the last message as it is, so it cannot be continued",
            param="continue_final_message",
        )
    return text[:place] if text.startswith(_MARK, place) else text[:place].rstrip()


def _wants_parts(template: str) -> bool:
    """Return True for a template that goes through the parts of each content, and takes no text."""
    return bool(_PARTS.search(template)) and "string" not in template


def _load_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    data = files.get("tokenizer.json")
    if data is None:
        raise ModelError("the model has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except BaseException as error:
        raise ModelError(f"tokenizer.json: {fault_of(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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
