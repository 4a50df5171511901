"""The tokens that end an answer, by all files of a model folder that name some."""

from collections.abc import Iterator
from pathlib import Path

from tandem.engine.architecture.json_file import MOST, JsonObject, read_json
from tandem.runtime.membership.folder_files import is_there
from tandem.runtime.printable import short

_MOST_ENDS = 256


def eos_token_ids(configs: list[JsonObject], folder: Path) -> tuple[int, ...]:
    """Return the ids of config.json, of generation_config.json and of the tokenizer's end.

    The second often names more than the first, and a chat model that was tuned from a base model
    often has the end of its turns in tokenizer_config.json alone. Raise ModelError.
    """
    files = list(configs)
    if is_there(folder / "generation_config.json"):
        files.append(read_json(folder / "generation_config.json"))
    ids: dict[int, None] = {}
    for file in files:
        value = file.data.get("eos_token_id")
        found = value if isinstance(value, list) else [] if value is None else [value]
        if len(found) > _MOST_ENDS:
            raise file.error("eos_token_id", f"names {len(found)} tokens, above {_MOST_ENDS}")
        for token_id in found:
            if not _is_token_id(token_id):
                raise file.error("eos_token_id", f"{short(repr(token_id))} is not a token id")
            ids[token_id] = None
    return tuple(ids | dict.fromkeys(_ends_of_tokenizer(folder)))


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST["vocab_size"]


def _ends_of_tokenizer(folder: Path) -> Iterator[int]:
    """Yield the id of `eos_token` of tokenizer_config.json, if the tokenizer has that token."""
    if not is_there(folder / "tokenizer_config.json"):
        return
    config = read_json(folder / "tokenizer_config.json")
    token = config.data.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return
    for token_id, entry in _items(config.data.get("added_tokens_decoder")):
        if isinstance(entry, dict) and entry.get("content") == text and token_id.isdecimal():
            yield from filter(_is_token_id, [int(token_id[:9])])
            return
    if is_there(folder / "tokenizer.json"):
        yield from filter(_is_token_id, [_id_in(read_json(folder / "tokenizer.json"), text)])


def _items(value: object) -> list[tuple[str, object]]:
    return list(value.items()) if isinstance(value, dict) else []


def _id_in(tokenizer: JsonObject, text: str) -> object:
    """Return the id of a token by tokenizer.json, None where it has none."""
    added = tokenizer.data.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and entry.get("content") == text:
            return entry.get("id")
    model = tokenizer.data.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    return vocab.get(text) if isinstance(vocab, dict) else None
