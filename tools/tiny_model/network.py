"""Qwen3 of transformers, for training on rows of several documents."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3Model

from tandem.models.random_model import ModelShape


class Qwen3(nn.Module):
    """A language model with tied embeddings whose `state_dict` has Hugging Face's names."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        config = Qwen3Config(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            use_cache=False,
        )
        self.model = Qwen3Model(config)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Residual branches start small, so that depth does not scale the output.
                is_branch_end = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / math.sqrt(2 * shape.num_layers) if is_branch_end else 0.02
                nn.init.normal_(weight, std=std)

    def forward(self, token_ids: Tensor, documents: Tensor) -> Tensor:
        """Hidden states [num_rows, num_tokens, hidden_size] before the output embedding.

        Both arguments are [num_rows, num_tokens]; tokens attend within their own document only.
        """
        num_tokens = token_ids.shape[1]
        same_document = documents[:, None, :, None] == documents[:, None, None, :]
        causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=token_ids.device)
        mask = same_document & causal.tril()  # [num_rows, 1, num_tokens, num_tokens]
        output: Tensor = self.model(token_ids, attention_mask=mask).last_hidden_state
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] |-> [..., vocab_size]."""
        return functional.linear(hidden, self.model.embed_tokens.weight)
