import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from tandem.frontend.tokens.codec import Codec
from tandem.frontend.tokens.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    DetokenizerFactory,
    WindowDetokenizer,
)
from tests.frontend.frontend_stack import byte_level_tokenizer, token_ids

TOKENIZER = byte_level_tokenizer()
FACTORY = DetokenizerFactory(Codec(TOKENIZER))


def sentencepiece_like() -> Tokenizer:
    """As Llama 2 and Mistral have it: "▁" for spaces, bytes for what is not in the vocabulary."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁wor", "ld"]
    letters = sorted(set("Helo wrd,.") - {" "})
    vocab = {word: index for index, word in enumerate(dict.fromkeys([*words, *letters]))}
    merges: list[tuple[str, str]] = []
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """As T5 and XLM-R have it: "▁" for spaces, added before the first word and dropped again."""
    scores = [
        ("<unk>", 0.0), ("▁", -5.0), *((letter, -9.0) for letter in "Helowrd,.é日本"),
        ("▁Hello", -2.0), ("▁wor", -3.0), ("ld", -3.0), ("▁the", -2.0),
    ]  # fmt: skip
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT has it: "##" before what continues a word, and no spaces at all."""
    letters = "Helowrd,.é日本"
    words = [
        "[UNK]",
        "Hello",
        "wor",
        "##ld",
        "the",
        *letters,
        *(f"##{letter}" for letter in letters),
    ]
    tokenizer = Tokenizer(
        models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return tokenizer


KINDS = {
    "byte-level": Tokenizer.from_str(byte_level_tokenizer().to_str()),
    "sentencepiece": sentencepiece_like(),
    "unigram": unigram(),
    "wordpiece": word_piece(),
}
for tokenizer in KINDS.values():
    tokenizer.add_special_tokens(["<s>", "</s>"])
TEXTS = [
    "Hello world",
    "Hello  world",
    "Hello world, the world. Hello",
    "日本 é 日本日本日本 é",
    "Hello wörld, 日本語 👩‍👩‍👧 été — ok",
    "Hello Hello Hello Hello Hello Hello Hello Hello Hello Hello",
]


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


def test_a_byte_level_tokenizer_takes_the_table() -> None:
    assert isinstance(FACTORY.new(), ByteDetokenizer)
    assert isinstance(DetokenizerFactory(Codec(sentencepiece_like())).new(), WindowDetokenizer)


def test_an_unfinished_character_is_replaced_only_at_the_end() -> None:
    detokenizer = FACTORY.new()
    ids = token_ids("a😀")
    assert detokenizer.push(ids[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_a_window_full_of_garbage_is_not_held_for_ever() -> None:
    tokenizer = sentencepiece_like()
    detokenizer = WindowDetokenizer(Codec(tokenizer))
    continuation = tokenizer.token_to_id("<0x80>")
    assert any(detokenizer.push([continuation]) for _ in range(40))


def test_unknown_ids_have_no_text() -> None:
    assert FACTORY.decode([10_000, *token_ids("ok")]) == "ok"


@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=30))
def test_any_tokens_give_what_the_tokenizer_decodes(ids: list[int]) -> None:
    """Invalid bytes too: both sides replace the maximal part of a broken character."""
    assert "".join(pieces(FACTORY.new(), ids)) == TOKENIZER.decode(ids) == FACTORY.decode(ids)


def test_a_token_of_half_a_character_shows_its_bytes() -> None:
    ids = token_ids("😀")
    shown = [FACTORY.token_text(token_id) for token_id in ids]
    assert [byte for _, data in shown for byte in data] == list("😀".encode())
    assert FACTORY.token_text(TOKENIZER.token_to_id("<|im_end|>"))[0] == "<|im_end|>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("specials", [0, 20])
def test_an_answer_is_the_text_that_its_tokens_add_to_the_prompts(kind: str, specials: int) -> None:
    """Wherever the prompt ends between two characters, and behind any special tokens."""
    tokenizer = KINDS[kind]
    factory, end = DetokenizerFactory(Codec(tokenizer)), [tokenizer.token_to_id("</s>")] * specials
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        whole = tokenizer.decode(ids)
        num_checked = 0
        for length in range(len(ids)):
            prompt = tokenizer.decode(ids[:length])
            if not whole.startswith(prompt):
                continue  # the prompt ends within a character
            detokenizer = factory.new(ids[:length] + end)
            assert prompt + "".join(pieces(detokenizer, ids[length:])) == whole
            num_checked += 1
        assert num_checked > len(ids) // 4


def test_a_character_that_the_prompt_begins_is_completed() -> None:
    tokenizer = KINDS["sentencepiece"]
    ids = tokenizer.encode("Hello 日本", add_special_tokens=False).ids
    for length in (len(ids) - 1, len(ids) - 2):
        detokenizer = DetokenizerFactory(Codec(tokenizer)).new(ids[:length])
        assert "".join(pieces(detokenizer, ids[length:])) == "本"


def test_a_prompt_without_any_text_is_no_context() -> None:
    tokenizer = KINDS["sentencepiece"]
    ids = tokenizer.encode("Hello", add_special_tokens=False).ids
    for prompt in ([], [tokenizer.token_to_id("<s>")] * 5000):
        detokenizer = DetokenizerFactory(Codec(tokenizer)).new(prompt)
        assert "".join(pieces(detokenizer, ids)) == "Hello"
