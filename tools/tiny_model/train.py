"""Trains the bundled model from nothing on the synthetic corpus.

python -m tools.tiny_model.train --minutes 25 --out my-model
"""

import argparse
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn import functional

from tandem.models.folder import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    SPECIAL_TOKENS,
    with_byte_level,
    write_generation_config,
    write_json,
    write_tokenizer,
)
from tandem.models.random_model import ModelShape, hugging_face_config
from tandem.runtime.errors import ModelError
from tools.tiny_model.corpus import Document, documents
from tools.tiny_model.corpus_thoughts import THINK
from tools.tiny_model.muon import Muon
from tools.tiny_model.network import Qwen3

logger = logging.getLogger(__name__)

SHAPE = ModelShape(
    vocab_size=2048,
    hidden_size=192,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=512,
    dtype="bfloat16",
)

_NUM_TOKENIZER_DOCUMENTS = 8_000
_PROMPT_WEIGHT = 0.1  # a prompt's own words are worth little: they only shape the embeddings
_WARMUP = 0.02  # of the run
_LONG_PHASE = 0.88  # of the run, after which rows are long
_LOG_INTERVAL_STEPS = 50
_SAVE_INTERVAL_S = 240.0
_CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One run. It ends after `steps`, or after `minutes` of wall-clock when `steps` is None."""

    steps: int | None = None
    minutes: float = 25.0
    seed: int = 0
    row_tokens: int = 256
    long_row_tokens: int = 1024
    batch_tokens: int = 2048
    learning_rate: float = 5e-3
    device: str = "cpu"
    autocast: bool = True  # matrix products in bfloat16; weights and optimizer stay float32


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows; each tensor is [num_rows, num_tokens]."""

    token_ids: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor  # the ordinal of each token's document within its row
    weights: torch.Tensor  # of each target in the loss


def train_tokenizer(
    vocab_size: int, seed: int, num_documents: int = _NUM_TOKENIZER_DOCUMENTS
) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` ids, special tokens first."""
    texts = (
        text
        for document in islice(documents(seed, long=False), num_documents)
        for _, text in document
    )
    tokenizer = with_byte_level(Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[float]]:
    """Token ids of a document as the chat template lays it out, and each one's loss weight."""
    token_ids: list[int] = []
    weights: list[float] = []

    def append(text: str, weight: float) -> None:
        ids = tokenizer.encode(text).ids
        token_ids.extend(ids)
        weights.extend([weight] * len(ids))

    for role, text in document:
        if role == "text":
            append(text, 1.0)
            append(END_OF_TEXT, 1.0)
        elif role == "assistant":
            opened = THINK if text.startswith(THINK) else ""  # by the prompt
            append(f"{IM_START}assistant\n{opened}", 0.0)
            append(f"{text.removeprefix(opened)}{IM_END}", 1.0)
            append("\n", 0.0)
        else:
            append(f"{IM_START}{role}\n", 0.0)
            append(text, _PROMPT_WEIGHT)
            append(f"{IM_END}\n", 0.0)
    return token_ids, weights


def batches(tokenizer: Tokenizer, seed: int, row_tokens: int, num_rows: int) -> Iterator[Batch]:
    """Endless packed batches; a document that crosses a row's end is cut there."""
    long = row_tokens >= 1024
    encoded = (encode(tokenizer, document) for document in documents(seed, long=long))
    while True:
        rows = []
        for _ in range(num_rows):
            token_ids: list[int] = []
            weights: list[float] = []
            ordinals: list[int] = []
            for ordinal, (ids, ws) in enumerate(encoded):
                token_ids += ids
                weights += [0.0, *ws[1:]]  # nothing before a document foretells its first token
                ordinals += [ordinal] * len(ids)
                if len(token_ids) > row_tokens:
                    break
            size = row_tokens + 1
            rows.append((token_ids[:size], weights[:size], ordinals[:size]))
        ids_tensor = torch.tensor([row[0] for row in rows])
        weight_tensor = torch.tensor([row[1] for row in rows])
        ordinal_tensor = torch.tensor([row[2] for row in rows])
        yield Batch(
            ids_tensor[:, :-1], ids_tensor[:, 1:], ordinal_tensor[:, :-1], weight_tensor[:, 1:]
        )


def batch_loss(network: Qwen3, batch: Batch, config: TrainConfig) -> torch.Tensor:
    """Weighted mean cross entropy in nats per token; targets of no weight are not computed."""
    device = config.device
    counted = batch.weights > 0
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=config.autocast):
        hidden = network(batch.token_ids.to(device), batch.documents.to(device))
        logits = network.logits(hidden[counted.to(device)]).float()
    targets, weights = batch.targets[counted].to(device), batch.weights[counted].to(device)
    losses = functional.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def _optimizers(network: Qwen3, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [weight for weight in network.model.layers.parameters() if weight.dim() == 2]
    known = {id(weight) for weight in matrices}
    others = [weight for weight in network.parameters() if id(weight) not in known]
    return [
        Muon(matrices, lr=config.learning_rate, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(others, lr=0.6 * config.learning_rate, betas=(0.9, 0.98), weight_decay=0),
    ]


def _rate(progress: float) -> float:
    """The learning rate's factor after `progress` of the run: warm-up, then a cosine to 2 %."""
    if progress < _WARMUP:
        return max(progress / _WARMUP, 0.01)
    done = (progress - _WARMUP) / (1 - _WARMUP)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def new_network(shape: ModelShape, seed: int) -> Qwen3:
    """A network with random weights that depend on the seed and the shape alone."""
    torch.manual_seed(seed)
    return Qwen3(shape)


def load_network(folder: Path, shape: ModelShape) -> Qwen3:
    """The network that `save_model` wrote; raises ModelError when it is of another shape."""
    network = Qwen3(shape)
    try:
        network.load_state_dict(load_file(folder / "model.safetensors"))
    except RuntimeError as error:
        raise ModelError(f"the weights in {folder} are not of this shape: {error}") from error
    return network


def train(
    network: Qwen3, tokenizer: Tokenizer, config: TrainConfig, out: Path | None
) -> list[float]:
    """Trains `network` in place, and into `out` every few minutes; returns every step's loss."""
    network.to(config.device)
    optimizers = _optimizers(network, config)
    peaks = [(group, group["lr"]) for opt in optimizers for group in opt.param_groups]
    short = _stream(tokenizer, config, config.row_tokens, seed=config.seed + 1)
    long = _stream(tokenizer, config, config.long_row_tokens, seed=config.seed + 2)
    losses: list[float] = []
    start = saved = time.perf_counter()
    while (progress := _progress(config, len(losses), time.perf_counter() - start)) < 1.0:
        for group, peak in peaks:
            group["lr"] = peak * _rate(progress)
        loss = batch_loss(network, next(long if progress > _LONG_PHASE else short), config)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if len(losses) % _LOG_INTERVAL_STEPS == 0:
            mean = sum(losses[-_LOG_INTERVAL_STEPS:]) / _LOG_INTERVAL_STEPS
            elapsed_s = time.perf_counter() - start
            num_tokens = len(losses) * config.batch_tokens
            logger.info(
                "step %d (%.0f %%), loss %.4f, %.0f tokens/s",
                len(losses), 100 * progress, mean, num_tokens / elapsed_s,
            )  # fmt: skip
        if out is not None and time.perf_counter() - saved > _SAVE_INTERVAL_S:
            save_model(out, tokenizer, network)
            saved = time.perf_counter()
    return losses


def _stream(
    tokenizer: Tokenizer, config: TrainConfig, row_tokens: int, seed: int
) -> Iterator[Batch]:
    return batches(tokenizer, seed, row_tokens, max(config.batch_tokens // row_tokens, 1))


def _progress(config: TrainConfig, steps_done: int, elapsed_s: float) -> float:
    if config.steps is not None:
        return steps_done / config.steps
    return elapsed_s / (60 * config.minutes)


def save_model(out: Path, tokenizer: Tokenizer, network: Qwen3) -> None:
    """A complete model folder at `out`; a reader sees each file old or new, never half of it."""
    out.mkdir(parents=True, exist_ok=True)
    shape = network.shape
    dtype = getattr(torch, shape.dtype)
    weights = {k: v.detach().to("cpu", dtype).contiguous() for k, v in network.state_dict().items()}
    with tempfile.TemporaryDirectory(dir=out) as scratch_name:
        scratch = Path(scratch_name)
        write_json(scratch / "config.json", hugging_face_config(shape, tokenizer))
        write_tokenizer(
            scratch,
            tokenizer,
            max_length_tokens=shape.max_position_embeddings,
            chat_template=_CHAT_TEMPLATE.read_text(encoding="utf-8"),
        )
        write_generation_config(scratch, tokenizer)
        save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
        shutil.copymode(scratch / "config.json", scratch / "model.safetensors")  # it is 0600
        for file in sorted(scratch.iterdir()):
            file.replace(out / file.name)
    logger.info("saved %s", out)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    defaults = TrainConfig()
    parser = argparse.ArgumentParser(prog="python -m tools.tiny_model.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--minutes", type=float, default=defaults.minutes)
    parser.add_argument("--steps", type=int, help="instead of --minutes")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--row-tokens", type=int, default=defaults.row_tokens)
    parser.add_argument("--batch-tokens", type=int, default=defaults.batch_tokens)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--device", default=defaults.device)
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--resume", type=Path, help="a folder of an earlier run to go on from")
    options = vars(parser.parse_args(argv))
    out, resume = options.pop("out"), options.pop("resume")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = replace(defaults, **options)
    if resume is None:
        tokenizer = train_tokenizer(SHAPE.vocab_size, config.seed)
        network = new_network(SHAPE, config.seed)
    else:
        tokenizer = Tokenizer.from_file(str(resume / "tokenizer.json"))
        network = load_network(resume, SHAPE)
    train(network, tokenizer, config, out)
    save_model(out, tokenizer, network)


if __name__ == "__main__":
    main()
