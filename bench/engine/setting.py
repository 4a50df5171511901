"""The model's shape, the number of rounds and the form of a target of the engine's sections."""

from dataclasses import replace

import torch

from tandem.bench.report.figures import Target
from tandem.bench.report.setting import Setting
from tandem.engine.architecture.architectures import QWEN3
from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.rope_config import RopeConfig

MAX_ROUNDS = 3
QWEN3_8B = ModelConfig(
    architecture=QWEN3,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151_936,
    max_position_embeddings=40_960,
    rms_norm_eps=1e-6,
    rope=RopeConfig(1_000_000.0),
    tie_word_embeddings=False,
    eos_token_ids=(),
    dtype="bfloat16",
)
TINY = replace(
    QWEN3_8B,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=512,
    dtype="float32",
)


def shape_for(setting: Setting) -> ModelConfig:
    """Return Qwen3-8B's shape; a tiny one for a dry run."""
    return TINY if setting.is_dry else QWEN3_8B


def target_for(setting: Setting, value: Target, share: Target) -> Target:
    """Return `value` on the GPU that targets are stated for, elsewhere the share of the floor."""
    if setting.is_dry or "H200" not in torch.cuda.get_device_name(setting.device):
        return share
    return value


def num_rounds(setting: Setting) -> int:
    """Return the number of rounds whose median counts."""
    return max(1, min(MAX_ROUNDS, setting.rounds))
