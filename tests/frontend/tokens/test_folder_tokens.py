"""The tokens that a folder names beside tokenizer.json, against AutoTokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tandem.frontend.tokens.tokenizer import ModelText
from tandem.runtime.errors import ModelError
from tandem.runtime.membership.model_files import read_model_files
from tests.frontend.frontend_stack import byte_level_tokenizer, model_files

NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "boi")
TEMPLATE = "|".join(f"{{{{ {name}_token }}}}" for name in NAMES)
TEXT = "x<new> <plain>y<sep>  <|im_end|>  z<image><s>"
NUM_TOKENS = byte_level_tokenizer().get_vocab_size()
CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
Files = dict[str, Any]


def token(content: str, **flags: bool) -> dict[str, object]:
    fields = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"content": content, **fields, "special": True, **flags}


def marked(content: str) -> dict[str, object]:
    return {"__type": "AddedToken", **token(content)}


FOLDERS: dict[str, Files] = {
    "the map alone": {MAP: {"bos_token": "<s>", "eos_token": token("<|im_end|>")}},
    "the map before the config": {
        CONFIG: {"bos_token": "<|im_end|>"},
        MAP: {"bos_token": "<|im_start|>"},
    },
    "a config of tokens before the map": {
        CONFIG: {"eos_token": "<|im_end|>", "added_tokens_decoder": {}},
        MAP: {"bos_token": "<s>"},
    },
    "names of all kinds": {
        CONFIG: {
            "sep_token": "<sep>", "cls_token": "<s>", "mask_token": marked("<new>"),
            "pad_token": None, "unk_token": "", "boi_token": "<|im_start|>", "add_bos_token": True,
        }
    },
    "named extra tokens": {CONFIG: {"extra_special_tokens": {"image_token": "<image>"}}},
    "extra tokens": {CONFIG: {"extra_special_tokens": ["<new>", "<sep>"]}},
    "additional tokens": {CONFIG: {"additional_special_tokens": ["<new>"]}},
    "additional tokens in the map": {MAP: {"additional_special_tokens": ["<new>", "<image>"]}},
    "tokens of the config": {
        CONFIG: {
            "added_tokens_decoder": {
                str(NUM_TOKENS + 1): token("<new>"),
                str(NUM_TOKENS): token("<plain>", special=False, normalized=True, lstrip=True),
            }
        }
    },
    "other flags": {
        CONFIG: {
            "added_tokens_decoder": {"0": token("<|im_end|>", rstrip=True)},
            "eos_token": "<|im_end|>",
        }
    },
    "a file of added tokens": {
        CONFIG: {"additional_special_tokens": ["<new>"]},
        ADDED: {"<new>": NUM_TOKENS, "<plain>": NUM_TOKENS + 1},
    },
}  # fmt: skip


def write(folder: Path, files: Files, num_tokens: int) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    given = files | {
        CONFIG: config | files.get(CONFIG, {}),
        "config.json": {"vocab_size": num_tokens},
    }
    for name, fields in given.items():
        (folder / name).write_text(json.dumps(fields))
    (folder / "tokenizer.json").write_text(byte_level_tokenizer().to_str())


def render(text: ModelText) -> str:
    return text.render([{"role": "user", "content": "x"}], {}, 10_000, 5.0)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_tokens_of_a_folder_are_those_of_auto_tokenizer(name: str, tmp_path: Path) -> None:
    write(tmp_path, FOLDERS[name], NUM_TOKENS + 8)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    text = ModelText(read_model_files(tmp_path).files)
    assert render(text) == oracle.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False
    )
    ids = text.encode(TEXT, is_chat=True)
    assert ids == oracle.encode(TEXT, add_special_tokens=False)
    assert text.detokenizers.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert text.decode(ids) == oracle.decode(ids)


def test_a_token_without_an_embedding_is_not_added(tmp_path: Path) -> None:
    """A client could write it, and the model has no row for it."""
    write(tmp_path, {CONFIG: {"additional_special_tokens": ["<new>", "<sep>"]}}, NUM_TOKENS + 1)
    ids = ModelText(read_model_files(tmp_path).files).encode("<new><sep>", is_chat=True)
    assert ids[0] == NUM_TOKENS and max(ids) == NUM_TOKENS and len(ids) > 2


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        (CONFIG, {"added_tokens_decoder": []}),
        (CONFIG, {"added_tokens_decoder": {"x": {"content": "y"}}}),
        (CONFIG, {"added_tokens_decoder": {"1": "y"}}),
        (CONFIG, {"extra_special_tokens": 7}),
        (ADDED, {"<x>": "y"}),
        (ADDED, []),
        (MAP, 1),
        # no texts: halves of surrogate pairs
        (CONFIG, {"added_tokens_decoder": {"1": {"content": "\ud800"}}}),
        (CONFIG, {"chat_template": "\udfff"}),
        (ADDED, {"\ud800": 300}),
        (MAP, {"bos_token": "\ud800"}),
    ],
)
def test_tokens_that_are_none_are_an_error_that_names_the_file(file: str, fields: object) -> None:
    with pytest.raises(ModelError, match=file.replace(".", r"\.")):
        ModelText(model_files().files | {file: json.dumps(fields).encode()})
