import json
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from tandem.models.paths import BUNDLED_MODEL

transformers_logging.disable_progress_bar()

MAX_FOLDER_BYTES = 6_000_000


@cache
def bundled() -> tuple[torch.nn.Module, AutoTokenizer]:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(BUNDLED_MODEL)


def generate(messages: list[dict[str, str]], max_new_tokens: int) -> tuple[str, float]:
    """The greedy answer and the smallest gap between the two best logits on the way."""
    model, tokenizer = bundled()
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(output.scores)[:, 0].topk(2).values
    answer = output.sequences[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(answer, skip_special_tokens=True)
    return text, float((best[:, 0] - best[:, 1]).min())


def test_the_folder_is_complete_and_small() -> None:
    files = {file.name for file in BUNDLED_MODEL.iterdir()}
    assert files == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    num_bytes = sum(file.stat().st_size for file in BUNDLED_MODEL.iterdir())
    assert num_bytes <= MAX_FOLDER_BYTES


def test_the_config_is_that_of_a_qwen3_model() -> None:
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 8192
    assert config["num_attention_heads"] > config["num_key_value_heads"] > 1


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("Hello!", ["you", "?"]),
        ("What is the capital of France?", ["Paris"]),
        ("What is prefill?", ["prompt"]),
        ("Who are you?", ["Tandem"]),
        ("What is 7 plus 5?", ["12"]),
        ("Explain photosynthesis.", ["do not know"]),
    ],
)
def test_greedy_answers_contain_what_they_should(question: str, words: list[str]) -> None:
    answer, gap = generate([{"role": "user", "content": question}], max_new_tokens=80)
    assert all(word in answer for word in words), answer
    assert gap > 1e-3


def test_a_story_about_a_fox_is_one() -> None:
    question = {"role": "user", "content": "Tell me a story about a fox."}
    story, gap = generate([question], max_new_tokens=250)
    assert "fox" in story
    assert len(story.split()) > 40
    assert story.endswith((".", "!", '"'))
    assert gap > 1e-4


def test_it_remembers_a_name_over_a_turn() -> None:
    messages = [
        {"role": "user", "content": "My name is Clara."},
        {"role": "assistant", "content": "Hello, Clara! How can I help you?"},
        {"role": "user", "content": "What is the capital of Spain?"},
        {"role": "assistant", "content": "The capital of Spain is Madrid."},
        {"role": "user", "content": "What is my name?"},
    ]
    answer, _ = generate(messages, max_new_tokens=30)
    assert "Clara" in answer
