"""A text in parts has the tokens of the whole."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tandem.frontend.tokens.codec import SHORT_CHARACTERS, Codec
from tandem.frontend.tokens.cuts import (
    EXPRESSIONS,
    PART_CHARACTERS,
    may_be_cut,
    parts_of,
)

# All that the expressions and NFC look at: cases, digits, marks, contractions, line ends, slashes.
CHARACTERS = "  \n\t\r\u00a0\u3000aBzſǅʰ中가ée\u0301\u0308\u1100\u11611½²٣_'s'LL/.-,!\u200d🙂"
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def by_expression(regex: str, behavior: str = "isolated", *, invert: bool = False) -> Any:
    split = pre_tokenizers.Split(Regex(regex), behavior, invert)
    return pre_tokenizers.Sequence([split, BYTE_LEVEL])


def tokenizer_of(pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    """A BPE whose tokens join whatever a word has, spaces and line ends included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([random_text(random.Random(0), 5_000)], trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
    return tokenizer


def random_text(rng: random.Random, length: int) -> str:
    pieces = [*CHARACTERS, "<|im_end|>", "the ", " of", "\n\n", "  ", "x y"]
    return "".join(rng.choices(pieces, k=length))


WORDS = {
    "ByteLevel": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    **{each: (lambda each=each: by_expression(each)) for each in sorted(EXPRESSIONS)},
}


@pytest.mark.parametrize("words", WORDS.values(), ids=range(len(WORDS)))
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["as it is", "NFC"])
def test_parts_have_the_tokens_of_the_whole(words: Callable[[], Any], normalizer: Any) -> None:
    tokenizer, rng, num_parts = tokenizer_of(words(), normalizer), random.Random(1), 0
    assert may_be_cut(tokenizer)
    for _ in range(100):
        text = random_text(rng, rng.randrange(1, 60))
        parts = parts_of(text, rng.randrange(1, 8))
        assert "".join(parts) == text
        ids = [each for part in parts for each in tokenizer.encode(part).ids]
        assert ids == tokenizer.encode(text).ids, parts
        num_parts += len(parts)
    assert num_parts > 200


def test_a_long_text_is_encoded_in_parts_with_special_tokens_around_the_whole() -> None:
    tokenizer = tokenizer_of(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|im_end|>",
        special_tokens=[(each, tokenizer.token_to_id(each)) for each in ("<s>", "<|im_end|>")],
    )
    codec, given = Codec(tokenizer), []

    class Watched:
        def encode_batch_fast(self, texts: list[str], **kwargs: bool) -> Any:
            given.append(len(texts))
            return tokenizer.encode_batch_fast(texts, **kwargs)

    codec._tokenizer = Watched()  # type: ignore[assignment]
    text = random_text(random.Random(2), 5 * PART_CHARACTERS)
    for adds_special in (True, False):
        expected = tokenizer.encode(text, add_special_tokens=adds_special).ids
        assert codec.encode(text, adds_special=adds_special, param="prompt") == expected
    assert len(given) == 2 and min(given) > 3


@pytest.mark.parametrize("length", [SHORT_CHARACTERS + 1, 3 * PART_CHARACTERS])
def test_a_text_without_a_place_to_cut_is_encoded_whole(length: int) -> None:
    tokenizer = tokenizer_of(pre_tokenizers.ByteLevel(add_prefix_space=False))
    for text in ("中" * length, " " * length, "- " * length):
        assert parts_of(text) == [text]
        expected = tokenizer.encode(text).ids
        assert Codec(tokenizer).encode(text, adds_special=True, param="prompt") == expected


def added(**rules: bool) -> Tokenizer:
    tokenizer = tokenizer_of(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_tokens([AddedToken("a b" if not rules else "MASK", **rules)])
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [
        added,
        lambda: added(rstrip=True),
        lambda: tokenizer_of(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda: tokenizer_of(BYTE_LEVEL),
        lambda: tokenizer_of(by_expression("[a-z ]+")),
        lambda: tokenizer_of(by_expression(min(EXPRESSIONS), "merged_with_next")),
        lambda: tokenizer_of(by_expression(min(EXPRESSIONS), invert=True)),
        lambda: tokenizer_of(pre_tokenizers.Metaspace()),
        lambda: tokenizer_of(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFKC()),
        lambda: Tokenizer(models.BPE()),
    ],
)
def test_a_tokenizer_that_may_join_what_is_cut_gets_texts_whole(
    make: Callable[[], Tokenizer],
) -> None:
    assert not may_be_cut(make())
