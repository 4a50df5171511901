"""The experts of a layer in the layout of the kernels, with their router."""

from dataclasses import replace

import torch

from tandem.engine.architecture.mixture_config import MixtureConfig
from tandem.engine.decoder.kernel_set import Kernels
from tandem.engine.decoder.linears import with_bias
from tandem.engine.weights.weights import LayerWeights
from tandem.kernels.reference.experts import ExpertWeights


class MixtureOfExperts:
    """The weighted sum of the results of a token's experts."""

    def __init__(
        self,
        config: MixtureConfig,
        layer: LayerWeights,
        kernels: Kernels,
        dtype: torch.dtype,
        factor: float,  # of the sum
    ) -> None:
        assert layer.router is not None
        assert layer.experts_gate_up is not None and layer.experts_down is not None
        self._routing = replace(config.routing, scale=config.routing.scale * factor)
        self._route = kernels.route
        self._router = with_bias(kernels.pack_linear(layer.router), layer.router_bias, dtype)
        self._correction = layer.router_correction
        self._experts = kernels.pack_experts(
            ExpertWeights(
                layer.experts_gate_up,
                layer.experts_down,
                layer.experts_gate_up_bias,
                layer.experts_down_bias,
                config.alpha,
                config.limit,
            )
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [num_tokens, hidden_size]
        shape = len(x), self._routing.num_chosen
        expert_ids = torch.empty(shape, dtype=torch.int32, device=x.device)
        weights = torch.empty(shape, dtype=torch.float32, device=x.device)
        self._route(self._router(x), self._correction, self._routing, expert_ids, weights)
        return self._experts(x, expert_ids, weights)
