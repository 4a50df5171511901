"""The calls of the tokenizers library: bounds, Python's lock, and panics."""

import ast
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from tandem.frontend.tokens import codec as codec_module
from tandem.frontend.tokens.codec import SHORT_CHARACTERS, SHORT_TOKENS, Codec
from tandem.runtime.errors import InvalidRequestError, ModelError
from tests.frontend.frontend_stack import byte_level_tokenizer

FRONTEND = Path(codec_module.__file__).parent.parent
BATCH_FORMS = {"encode_batch_fast", "decode_batch"}  # which release Python's lock


class Watched:
    """A tokenizer that notes the calls of its methods."""

    def __init__(self) -> None:
        self.tokenizer = byte_level_tokenizer()
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.called.append(name)
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("excess", [0, 1])
def test_what_takes_long_is_done_by_a_form_that_releases_the_lock(excess: int) -> None:
    watched = Watched()
    codec = Codec(watched)  # type: ignore[arg-type]
    text = "a b " * (SHORT_CHARACTERS // 4) + "x" * excess
    token_ids = [watched.tokenizer.token_to_id("a")] * (SHORT_TOKENS + excess)
    watched.called.clear()
    expected = watched.tokenizer.encode(text).ids
    assert codec.encode(text, adds_special=True, param="prompt") == expected
    assert codec.decode(token_ids, skips_special=False) == "a" * len(token_ids)
    assert len(watched.called) == 2 and set(watched.called) == (
        BATCH_FORMS if excess else {"encode", "decode"}
    )


def test_no_other_module_of_the_frontend_calls_the_library_on_texts() -> None:
    """`tokenizer.py` makes a Tokenizer from a file; the calls on it stand in `codec.py`."""
    found = {
        path.name
        for path in FRONTEND.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "tokenizers"
    }
    assert found == {"codec.py", "tokenizer.py"}


@pytest.mark.parametrize("length", [40, 2 * SHORT_CHARACTERS])
def test_a_panic_of_the_library_is_an_error_that_names_the_field(length: int) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    with pytest.raises(InvalidRequestError, match="retry-limit-in-match") as caught:
        Codec(tokenizer).encode("a" * length, adds_special=False, param="messages")
    assert caught.value.param == "messages"


def test_an_error_of_the_library_is_one_of_ours() -> None:
    codec = Codec(Tokenizer(models.WordLevel({"a": 0}, unk_token="?")))
    with pytest.raises(InvalidRequestError, match="UNK") as caught:
        codec.encode("b", adds_special=False, param="prompt")
    assert caught.value.param == "prompt"
    with pytest.raises(ModelError, match="decoding"):
        codec.decode([-1], skips_special=False)
