import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from tandem.models.random_model import ModelShape
from tandem.runtime.errors import ModelError
from tools.tiny_model.corpus_thoughts import with_thought
from tools.tiny_model.corpus_tools import Tool, ToolUse, tool_section
from tools.tiny_model.network import Qwen3
from tools.tiny_model.train import (
    TrainConfig,
    batches,
    encode,
    load_network,
    new_network,
    save_model,
    train,
    train_tokenizer,
)

transformers_logging.disable_progress_bar()

SHAPE = ModelShape(vocab_size=400, hidden_size=32, num_layers=2, intermediate_size=64)
SHAPE_FLOAT32 = replace(SHAPE, dtype="float32")
CONFIG = TrainConfig(
    steps=5,
    row_tokens=64,
    long_row_tokens=128,
    batch_tokens=256,
    learning_rate=0.05,
    autocast=False,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(SHAPE.vocab_size, seed=0, num_documents=200)


def test_five_steps_lower_the_loss(tokenizer: Tokenizer) -> None:
    losses = train(new_network(SHAPE, seed=0), tokenizer, CONFIG, out=None)
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.1


def test_a_seed_and_a_number_of_steps_decide_the_run(tokenizer: Tokenizer) -> None:
    config = replace(CONFIG, steps=2)
    first, second = (train(new_network(SHAPE, 3), tokenizer, config, None) for _ in range(2))
    assert first == second


def test_the_network_is_qwen3_as_transformers_has_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Qwen3(SHAPE_FLOAT32)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, mean=1.0 if weight.dim() == 1 else 0.0, std=0.2)
    save_model(tmp_path, tokenizer, network)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    token_ids = torch.randint(0, SHAPE.vocab_size, (2, 40))
    with torch.inference_mode():
        ours = network.logits(network(token_ids, torch.zeros_like(token_ids)))
        theirs = reference(token_ids).logits
    assert type(reference).__name__ == "Qwen3ForCausalLM"
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_documents_in_one_row_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    network = Qwen3(SHAPE)
    token_ids = torch.randint(0, SHAPE.vocab_size, (1, 20))
    changed = token_ids.clone()
    changed[0, :10] = 7
    documents = torch.tensor([[0] * 10 + [1] * 10])
    with torch.inference_mode():
        first, second = network(token_ids, documents), network(changed, documents)
    torch.testing.assert_close(first[0, 10:], second[0, 10:])
    assert not torch.allclose(first[0, :10], second[0, :10])


def test_training_text_is_what_the_chat_template_writes(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_model(tmp_path, tokenizer, Qwen3(SHAPE))
    served = AutoTokenizer.from_pretrained(tmp_path)
    document = [("system", "Be kind."), ("user", "Hello!"), ("assistant", "Hi, Tess.\nBye.")]
    messages = [{"role": role, "content": text} for role, text in document]
    token_ids, weights = encode(tokenizer, document)
    template_ids = served.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert token_ids == template_ids
    answer = [i for i, weight in zip(token_ids, weights, strict=True) if weight == 1.0]
    assert served.decode(answer) == "Hi, Tess.\nBye.<|im_end|>"


def test_a_tool_conversation_in_training_is_what_the_chat_template_writes(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_model(tmp_path, tokenizer, Qwen3(SHAPE))
    served = AutoTokenizer.from_pretrained(tmp_path)
    tools = [
        Tool("get_weather", {"city": "string", "days": "integer"}, "The weather in a city."),
        Tool("get_time", {}, ""),
    ]
    call = {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}
    use = ToolUse(tools[0], "Weather in Zürich?", call["arguments"], "", "18 degrees", "It is 18.")
    schemas: list[dict[str, Any]] = [
        {"type": "object", "properties": {key: {"type": kind} for key, kind in each.items()}}
        for each in (tool.parameters for tool in tools)
    ]
    functions = [
        {"name": tool.name, "description": tool.description, "parameters": schema}
        for tool, schema in zip(tools, schemas, strict=True)
    ]
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": use.question},
        {"role": "assistant", "content": None, "tool_calls": [{"function": call}]},
        {"role": "tool", "content": use.result},
    ]
    document = [
        ("system", "Be kind.\n\n" + tool_section(tools)),
        ("user", use.question),
        ("assistant", use.call),
        ("tool", use.result),
        ("assistant", with_thought("The tool knows.", use.answer)),
    ]
    token_ids, weights = encode(tokenizer, document)
    prompt_ids = served.apply_chat_template(
        messages,
        tools=[{"type": "function", "function": each} for each in functions],
        add_generation_prompt=True,
        enable_thinking=True,
        return_dict=True,
    )["input_ids"]
    assert token_ids[: len(prompt_ids)] == prompt_ids
    assert served.decode(token_ids[len(prompt_ids) :]) == (
        "The tool knows.\n</think>\n\nIt is 18.<|im_end|>\n"
    )
    assert set(weights[len(prompt_ids) : -1]) == {1.0} and weights[len(prompt_ids) - 1] == 0.0


def test_rows_are_full_and_the_first_token_of_a_document_has_no_weight(
    tokenizer: Tokenizer,
) -> None:
    batch = next(batches(tokenizer, seed=0, row_tokens=200, num_rows=3))
    assert batch.token_ids.shape == batch.targets.shape == (3, 200)
    assert torch.equal(batch.token_ids[:, 1:], batch.targets[:, :-1])
    starts = batch.documents[:, 1:] != batch.documents[:, :-1]
    assert starts.any()
    assert (batch.weights[:, :-1][starts] == 0).all()


def test_a_saved_folder_is_complete_and_saved_over_in_place(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for _ in range(2):
        save_model(tmp_path, tokenizer, Qwen3(SHAPE))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.token_to_id("<|im_end|>")


def test_a_run_goes_on_from_a_saved_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    network = new_network(SHAPE_FLOAT32, seed=0)
    save_model(tmp_path, tokenizer, network)
    loaded = load_network(tmp_path, SHAPE_FLOAT32).state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in network.state_dict().items())
    with pytest.raises(ModelError, match="not of this shape"):
        load_network(tmp_path, replace(SHAPE, hidden_size=64))
