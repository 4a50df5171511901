import json
import re
from itertools import islice

from tools.tiny_model.corpus import documents
from tools.tiny_model.corpus_words import Writer

NUM_DOCUMENTS = 1_000
JSON_OBJECT = re.compile(r'\{(".*)?\}')
CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>$")


DOCUMENTS = list(islice(documents(0, long=False), NUM_DOCUMENTS))
TEXTS = [message for document in DOCUMENTS for message in document]


def test_a_seed_decides_every_word() -> None:
    assert list(islice(documents(0, long=False), 100)) == DOCUMENTS[:100]
    assert list(islice(documents(1, long=False), 100)) != DOCUMENTS[:100]


def test_conversations_alternate_and_end_with_an_answer() -> None:
    for document in islice(documents(1, long=True), 200):
        roles = " ".join(role for role, _ in document)
        assert re.fullmatch(r"text|(system )?(user assistant( tool assistant)? ?)+", roles)
        assert roles.endswith(("assistant", "text"))


def test_no_template_syntax_is_left_in_the_text() -> None:
    for _, text in TEXTS:
        assert not re.search(r"[{}|$]", JSON_OBJECT.sub("", text)), text
        assert "  " not in text and text == text.strip(), text


def test_answers_are_sentences() -> None:
    for role, text in TEXTS:
        if role == "assistant" and " " in text and text[0].isupper() and len(text) > 40:
            assert not re.search(r"[a-z][.!?][A-Z]|\.\.| [,.]", text), text


def test_answers_vary_in_length_from_a_word_to_a_story() -> None:
    num_words = sorted(len(text.split()) for role, text in TEXTS if role == "assistant")
    assert num_words[0] <= 2
    assert num_words[-1] >= 100
    assert len({text for role, text in TEXTS if role == "assistant"}) > NUM_DOCUMENTS / 2


def test_sums_in_the_corpus_are_right() -> None:
    pattern = re.compile(r"^(\d+) (plus|minus|times) (\d+) (?:is|equals) (\d+)\.$")
    sums = [match for role, text in TEXTS if role == "assistant" if (match := pattern.match(text))]
    assert len(sums) > 20
    for match in sums:
        a, word, b, result = int(match[1]), match[2], int(match[3]), int(match[4])
        assert {"plus": a + b, "minus": a - b, "times": a * b}[word] == result


def test_calls_are_of_a_listed_tool_and_have_its_parameters() -> None:
    num_calls = 0
    for document in DOCUMENTS:
        for _, text in document:
            if "{" not in text or not (found := CALL.search(text)):
                continue
            call = json.loads(found[1])
            line = f"{call['name']}({', '.join(f'{key}: TYPE' for key in call['arguments'])})"
            listed = re.sub(r": (string|number|integer|boolean)", ": TYPE", document[0][1])
            assert line in listed, text
            num_calls += 1
    assert num_calls > NUM_DOCUMENTS / 5


def test_reasoning_is_in_the_last_answer_alone() -> None:
    num_thoughts = 0
    for document in DOCUMENTS:
        assert not any("<think>" in text or "</think>" in text for _, text in document[:-1])
        last = document[-1][1]
        if "think>" in last:
            assert re.fullmatch(r"<think>\n[^<]+\n</think>\n\n\S(.|\n)*", last), last
            num_thoughts += 1
    assert num_thoughts > NUM_DOCUMENTS / 10


def test_alternatives_nest_and_slots_are_filled_last() -> None:
    said = {Writer(seed).say("{a|b{1|2}} $x", x="{not|split}") for seed in range(50)}
    assert said == {"a {not|split}", "b1 {not|split}", "b2 {not|split}"}
