import re
from itertools import islice

import pytest

from tools.tiny_model.corpus import documents
from tools.tiny_model.corpus_words import Writer, and_list, with_article

NUM_DOCUMENTS = 3_000


def texts(seed: int = 0) -> list[tuple[str, str]]:
    return [
        message for doc in islice(documents(seed, long=False), NUM_DOCUMENTS) for message in doc
    ]


def test_a_seed_decides_every_word() -> None:
    assert texts(5) == texts(5)
    assert texts(5) != texts(6)


def test_conversations_alternate_and_end_with_an_answer() -> None:
    for document in islice(documents(1, long=True), 500):
        roles = [role for role, _ in document if role not in ("system", "text")]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert document[-1][0] in ("assistant", "text")


def test_no_template_syntax_is_left_in_the_text() -> None:
    for _, text in texts():
        assert not re.search(r"[{}|$]", text), text
        assert "  " not in text and text == text.strip(), text


def test_answers_are_sentences() -> None:
    for role, text in texts():
        if role == "assistant" and " " in text and text[0].isupper() and len(text) > 40:
            assert not re.search(r"[a-z][.!?][A-Z]|\.\.| [,.]", text), text


def test_answers_vary_in_length_from_a_word_to_a_story() -> None:
    num_words = sorted(len(text.split()) for role, text in texts() if role == "assistant")
    assert num_words[0] <= 2
    assert num_words[-1] >= 100
    assert len({text for role, text in texts() if role == "assistant"}) > NUM_DOCUMENTS / 2


def test_sums_in_the_corpus_are_right() -> None:
    pattern = re.compile(r"^(\d+) (plus|minus|times) (\d+) (?:is|equals) (\d+)\.$")
    sums = [
        match for role, text in texts() if role == "assistant" if (match := pattern.match(text))
    ]
    assert len(sums) > 50
    for match in sums:
        a, word, b, result = int(match[1]), match[2], int(match[3]), int(match[4])
        assert {"plus": a + b, "minus": a - b, "times": a * b}[word] == result


def test_alternatives_nest_and_slots_are_filled_last() -> None:
    said = {Writer(seed).say("{a|b{1|2}} $x", x="{not|split}") for seed in range(50)}
    assert said == {"a {not|split}", "b1 {not|split}", "b2 {not|split}"}


@pytest.mark.parametrize(
    ("items", "text"), [(["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b, and c")]
)
def test_lists_are_joined_as_in_english(items: list[str], text: str) -> None:
    assert and_list(items) == text


def test_articles_follow_the_first_letter() -> None:
    assert (with_article("owl"), with_article("fox")) == ("an owl", "a fox")
