"""A trunk of transformers as a flat program: the calls of its modules, one after another."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.transformers_models.generic_attention import attend, attend_rotated, is_attention
from tandem.engine.transformers_models.generic_heads import fuse_heads
from tandem.engine.transformers_models.generic_parts import Part

logger = logging.getLogger(__name__)

_POSITIONS = 1, 7, 4  # of the tokens that the program is compared with

# (token ids, positions), each [1, num_tokens] |-> hidden states [1, num_tokens, hidden_size]
Trunk = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Pass(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = self.trunk(input_ids=token_ids, position_ids=positions, use_cache=False)
        return out.last_hidden_state  # type: ignore[no-any-return]


class _Tracer(fx.Tracer):
    """Looks into the modules around attention, and into no others."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_attention(m) or not any(map(is_attention, m.modules()))


@torch.no_grad()
def flat_trunk(trunk: nn.Module, config: ModelConfig, device: torch.device) -> Trunk:
    """Return the pass of a trunk, flat where that is the same; heads are fused where they can be.

    Whatever a trace cannot follow, a branch by a tensor or a shape above all, ends it.
    """
    whole = _Pass(trunk)
    positions = torch.tensor([_POSITIONS], device=device)
    inputs = torch.zeros_like(positions), positions
    q_size = config.num_heads * config.head_dim
    tokens = (
        attend.set(lambda call, q, k, v: q[..., : v.shape[2]]),
        attend_rotated.set(lambda call, qkv, angles: qkv[:, :q_size]),
    )
    try:
        fuse_heads(_attention_calls(whole, inputs), config.head_dim)
        expected = whole(*inputs)
        flat = _traced(whole)
        torch.testing.assert_close(flat(*inputs), expected)
        return flat
    except Exception as error:  # of modelling code that computes with more than tensors
        logger.info("layers are called as modules: %s", error)
        return whole
    finally:
        attend.reset(tokens[0])
        attend_rotated.reset(tokens[1])


def _attention_calls(
    whole: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> dict[nn.Module, dict[str, Any]]:
    """Return the attention modules of a pass with their arguments by name."""
    calls: dict[nn.Module, dict[str, Any]] = {}

    def note(module: nn.Module, unnamed: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls[module] = dict(zip(("hidden_states",), unnamed, strict=False)) | named

    modules = [each for each in whole.modules() if not isinstance(each, Part)]
    hooks = [each.register_forward_pre_hook(note, with_kwargs=True) for each in modules]
    whole(*inputs)
    for hook in hooks:
        hook.remove()
    return {module: named for module, named in calls.items() if is_attention(module)}


def _traced(whole: nn.Module) -> Trunk:
    graph = _Tracer().trace(whole)
    for node in list(graph.nodes):
        if node.op == "call_module":  # which would look the module up and for hooks
            with graph.inserting_before(node):
                call = _function(whole.get_submodule(node.target).forward)
                node.replace_all_uses_with(graph.call_function(call, node.args, node.kwargs))
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return fx.GraphModule(whole, graph).forward


def _function(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        return method(*arguments, **named)

    # The program calls functions of torch by their public names, which methods do not have.
    return call if method.__module__.startswith("torch.") else method
