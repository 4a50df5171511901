"""The calls of the tokenizers library: bounds, Python's lock, and panics."""

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tandem.frontend.tokens.codec import SHORT_CHARACTERS, SHORT_TOKENS, Codec
from tandem.frontend.tokens.tokenizer_bounds import MAX_GROWTH, MAX_TOKEN_CHARACTERS
from tandem.runtime.errors import InvalidRequestError, ModelError
from tests.frontend.frontend_stack import byte_level_tokenizer

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


def with_parts(**parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def replaced(kind: Any, *steps: tuple[str | Regex, str]) -> Any:
    return kind.Sequence([kind.Replace(*step) for step in steps])


@pytest.mark.parametrize(
    ("kind", "part"), [(normalizers, "normalizer"), (decoders, "decoder")], ids=str
)
@pytest.mark.parametrize(
    ("steps", "is_refused"),
    [
        ([("a", "b" * MAX_GROWTH)], False),
        ([("a", "b" * (MAX_GROWTH + 1))], True),
        ([("a", "bb")] * 8, False),
        ([("a", "bb")] * 9, True),
        ([(Regex("x*"), "b" * MAX_GROWTH)], True),
        ([("ab", "b" * MAX_GROWTH), ("bb", "bb")], False),
        ([("a", "")] * 99, False),
    ],
)
def test_a_text_that_grows_beyond_bounds_is_refused_with_its_tokenizer(
    kind: Any, part: str, steps: list[tuple[str | Regex, str]], is_refused: bool
) -> None:
    tokenizer = with_parts(**{part: replaced(kind, *steps)})
    if is_refused:
        with pytest.raises(ModelError, match=rf"tokenizer\.json: the {part} makes over"):
            Codec(tokenizer)
    else:
        assert Codec(tokenizer).longest_token == 1


def test_a_token_of_no_reasonable_length_is_refused() -> None:
    tokenizer = with_parts()
    tokenizer.add_tokens(["b" * (MAX_TOKEN_CHARACTERS + 1)])
    with pytest.raises(ModelError, match="a token has 8193 characters"):
        Codec(tokenizer)


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_short_texts_are_tokenized_with_the_lock_by_known_expressions_only() -> None:
    split, byte_level = pre_tokenizers.Split, pre_tokenizers.ByteLevel()
    known = pre_tokenizers.Sequence([split(Regex(QWEN2), "isolated"), byte_level])
    unknown = pre_tokenizers.Sequence([split(Regex("(a+)+b"), "isolated"), byte_level])
    space = normalizers.Replace(Regex(" {2,}"), " ")
    assert Codec(byte_level_tokenizer()).is_quick
    assert Codec(with_parts(pre_tokenizer=known)).is_quick
    assert Codec(with_parts(pre_tokenizer=split(" ", "isolated"))).is_quick
    assert not Codec(with_parts(pre_tokenizer=unknown)).is_quick
    assert not Codec(with_parts(normalizer=space)).is_quick
    watched = Watched()
    codec = Codec(watched)  # type: ignore[arg-type]
    codec.is_quick = False
    watched.called.clear()
    codec.encode("a", adds_special=False, param="prompt")
    assert watched.called == ["encode_batch_fast"]
