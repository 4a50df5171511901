"""The Qwen3 architecture for training: names and numbers are those of Hugging Face's model.

Serving has its own implementation, `tandem.engine`; this one is differentiable and has no cache.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem.models.random_model import ModelShape

_RMS_NORM_EPS = 1e-6


def rope_tables(
    shape: ModelShape, num_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [num_positions, head_dim]."""
    exponents = torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim
    positions = torch.arange(num_positions, device=device)
    angles = torch.outer(positions, shape.rope_theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention; queries and keys are normalized per head before they are rotated."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        q_size = shape.num_heads * shape.head_dim
        kv_size = shape.num_kv_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=_RMS_NORM_EPS)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=_RMS_NORM_EPS)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        # x: [num_rows, num_tokens, hidden_size]
        heads = (*x.shape[:2], -1, self.head_dim)
        # Under autocast projections are bfloat16, and norms stay float32.
        q = self.q_norm(self.q_proj(x).float().view(heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).float().view(heads)).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        num_shares = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(num_shares, dim=1), v.repeat_interleave(num_shares, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Layer(nn.Module):
    """Attention and MLP, each behind its norm and beside its residual."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=_RMS_NORM_EPS)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=_RMS_NORM_EPS)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class _Body(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=_RMS_NORM_EPS)


class Qwen3(nn.Module):
    """A language model with tied embeddings whose `state_dict` has Hugging Face's names."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Body(shape)
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
        cos, sin = rope_tables(self.shape, num_tokens, token_ids.device)
        same_document = documents[:, None, :, None] == documents[:, None, None, :]
        causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=token_ids.device)
        mask = same_document & causal.tril()  # [num_rows, 1, num_tokens, num_tokens]
        x = self.model.embed_tokens(token_ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        output: Tensor = self.model.norm(x)
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] |-> [..., vocab_size]."""
        return functional.linear(hidden, self.model.embed_tokens.weight)
