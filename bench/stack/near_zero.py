"""A model that costs next to nothing and answers in plain characters, one per token."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tandem.models.random_model import PRESETS, ModelShape, write_shape

SHAPE = PRESETS["near-zero"]
_EMBEDDING = "model.embed_tokens.weight"


def write_near_zero_model(path: Path, shape: ModelShape = SHAPE) -> Path:
    """Write a model of `shape` whose greedy answers are printable ASCII; return `path`.

    A random model's bytes seldom make whole characters, and a server holds half characters back:
    its first token would be timed at the second or third.
    """
    write_shape(path, shape)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    weights = load_file(path / "model.safetensors")
    for token_id in range(shape.vocab_size):
        text = tokenizer.decode([token_id])
        if not (len(text) == 1 and text.isascii() and text.isprintable()):
            # tied embeddings: its logit is 0, and the best of some ninety draws is far above
            weights[_EMBEDDING][token_id] = torch.zeros(shape.hidden_size)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
