"""The files of a model folder that are not weights: tokenizer, chat template, config.json."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END]

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """`value` as indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def byte_level_tokenizer(vocab_size: int) -> Tokenizer:
    """An untrained byte-level tokenizer with exactly `vocab_size` ids, at least 259.

    Ids 0 .. 255 are the bytes (all that encoding yields), 256 .. 258 the special tokens, the rest
    words that only a model's output can contain.
    """
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for name in SPECIAL_TOKENS:
        vocab[name] = len(vocab)
    for index in range(len(vocab), vocab_size):
        vocab[f"Ġw{index}"] = index
    return with_byte_level(Tokenizer(models.BPE(vocab=vocab, merges=[])))


def with_byte_level(tokenizer: Tokenizer) -> Tokenizer:
    """`tokenizer` itself, set to byte-level splitting and decoding and to the special tokens."""
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(
    path: Path, tokenizer: Tokenizer, *, max_length_tokens: int, chat_template: str = CHAT_TEMPLATE
) -> None:
    """Write tokenizer.json and tokenizer_config.json into the folder `path`."""
    tokenizer.save(str(path / "tokenizer.json"))
    ids = {tokenizer.token_to_id(name): name for name in SPECIAL_TOKENS}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {str(i): {"content": name, **flags, "special": True} for i, name in ids.items()}
    write_json(
        path / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "added_tokens_decoder": added,
            "additional_special_tokens": [IM_START, IM_END],
            "bos_token": None,
            "chat_template": chat_template,
            "clean_up_tokenization_spaces": False,
            "eos_token": IM_END,
            "model_max_length": max_length_tokens,
            "pad_token": END_OF_TEXT,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": None,
        },
    )


def write_generation_config(path: Path, tokenizer: Tokenizer, **sampling: float | int) -> None:
    """generation_config.json: what ends an answer, and the sampling that suits the model."""
    end_ids = [tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)]
    settings = {"eos_token_id": end_ids, "pad_token_id": end_ids[1], **sampling}
    write_json(path / "generation_config.json", settings)
