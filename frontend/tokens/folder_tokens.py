"""The special and added tokens that a model folder names beside tokenizer.json.

They are read as `AutoTokenizer` of transformers reads them.
"""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tandem.runtime.errors import ModelError

_CONFIG, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class FolderTokens:
    """The tokens of one folder. Raises ModelError naming the file at fault.

    `named` are those with a name, such as `bos_token`, which are variables of a chat template.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.config = fields = load_json(files, _CONFIG)
        is_complete = "added_tokens_decoder" in fields
        if not is_complete:  # a folder of an older library
            fields = fields | load_json(files, _MAP)
        extra = fields.get("extra_special_tokens") or fields.get("additional_special_tokens") or []
        if isinstance(extra, dict):
            fields, extra = fields | extra, []
        if not isinstance(extra, list):
            raise ModelError(f"{_CONFIG}: the special tokens {extra!r} are no list")
        named = {
            name: _special(value)
            for name, value in fields.items()
            if name.endswith("_token") and _text(value) is not None
        }
        self.named = {name: token.content for name, token in named.items()}
        extras = [_special(value) for value in extra if _text(value) is not None]
        self._specials = [token for token in (*named.values(), *extras) if token.content]
        self._added = (
            _added_in_config(fields["added_tokens_decoder"])
            if is_complete
            else _added_in_file(load_json(files, _ADDED), self._specials)
        )
        self._vocab_size = _vocab_size(load_json(files, "config.json"))

    def add_to(self, tokenizer: Tokenizer) -> None:
        """Add the tokens that the tokenizer lacks, as far as the model has embeddings for them."""
        present = tokenizer.get_added_tokens_decoder()
        known = {_key(token) for token in present.values()}
        missing = [token for token in self._added if _key(token) not in known]
        contents = {token.content for token in (*present.values(), *missing)}
        for token in self._specials:
            if token.content not in contents:
                missing.append(token)
                contents.add(token.content)
        next_id = max([tokenizer.get_vocab_size(with_added_tokens=False) - 1, *present]) + 1
        kept = []
        for token in missing:
            if tokenizer.token_to_id(token.content) is None:
                if self._vocab_size is not None and next_id >= self._vocab_size:
                    continue
                next_id += 1
            kept.append(token)
        if kept:
            tokenizer.add_tokens(kept)


def load_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the object in a file, empty where there is none. Raises ModelError naming it."""
    try:
        loaded = json.loads(files.get(name, b"{}"))
        json.dumps(loaded, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name}: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{name} is not a JSON object")
    return loaded


def _vocab_size(config: Mapping[str, Any]) -> int | None:
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        if type(part.get("vocab_size")) is int:
            return int(part["vocab_size"])
    return None


def _added_in_config(tokens: object) -> list[AddedToken]:
    """Return the tokens of an object from id to token, by their ids."""
    if not isinstance(tokens, dict):
        raise ModelError(f"{_CONFIG}: added_tokens_decoder is not an object")
    by_id = {_id(number, _CONFIG): _token(token) for number, token in tokens.items()}
    return [by_id[number] for number in sorted(by_id)]


def _added_in_file(ids: Mapping[str, Any], specials: list[AddedToken]) -> list[AddedToken]:
    """Return the tokens of an object from text to id, by their ids."""
    special = {token.content for token in specials}
    by_id = {_id(number, _ADDED): content for content, number in ids.items()}
    return [
        AddedToken(by_id[number], special=is_special, normalized=not is_special)
        for number in sorted(by_id)
        for is_special in [by_id[number] in special]
    ]


def _id(value: object, file: str) -> int:
    if isinstance(value, str | int) and str(value).isdecimal():
        return int(value)
    raise ModelError(f"{file}: {value!r} is no token id")


def _text(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _token(value: object) -> AddedToken:
    content = _text(value)
    if content is None or not isinstance(value, dict):
        raise ModelError(f"{_CONFIG}: {value!r} is no token")
    flags = {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)}
    return AddedToken(content, **flags)


def _special(value: object) -> AddedToken:
    flags = value if isinstance(value, dict) else {}
    return _token({"content": _text(value)} | flags | {"special": True})


def _key(token: AddedToken) -> tuple[object, ...]:
    return (token.content, *(getattr(token, name) for name in _FLAGS))
