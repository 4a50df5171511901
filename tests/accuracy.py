"""A model's numbers beside those of its own modules, both judged by their distance from float64's.

How far float32's results lie from the exact ones differs from processor to processor, with the
order in which each adds. So no bound is read off one machine: an engine may be a few times as far
off as transformers' or PyTorch's modules are.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

# Our largest error in three rows is up to 3 times theirs in all rows, on any width of vectors; a
# wrong term is thousands of times as large.
_TIMES = 8
_FEW_UNITS = 8  # of rounding, where theirs are exact by luck


@dataclass(frozen=True)
class Judged:
    """Numbers as the modules compute them, and the same in float64."""

    theirs: torch.Tensor  # [num_rows, ...]
    exact: torch.Tensor  # of the same shape

    @property
    def allowed(self) -> float:
        """The largest error of another computation in the dtype of `theirs`."""
        unit = torch.finfo(self.theirs.dtype).eps / 2
        theirs = float((self.theirs.double() - self.exact).abs().max())
        return _TIMES * theirs + _FEW_UNITS * unit * float(self.exact.abs().max())

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Judged":
        """Return both after `change`."""
        return Judged(change(self.theirs), change(self.exact))

    def assert_near(
        self, ours: torch.Tensor, where: slice | list[int] | tuple[int, ...] = slice(None)
    ) -> None:
        """Assert that `ours` is as near to the exact numbers there as all of theirs are."""
        exact = self.exact[where]
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=self.allowed)

    def assert_likeliest(self, token_ids: Sequence[int], rows: slice) -> None:
        """Assert that each token is the likeliest by its row of logits.

        Of two whose logits are nearer to one another than rounding is, either may be.
        """
        exact = self.exact[rows]
        behind = exact.amax(-1) - exact.gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
        assert float(behind.max()) <= 2 * self.allowed, behind


class _InFloat64(TorchFunctionMode):
    """PyTorch with float64 wherever code asks for float32, as norms and ropes do for precision."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` with float64 in the place of float32."""
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(_wide, args), **{key: _wide(it) for key, it in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@lru_cache(maxsize=1)
def _in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same model, which computes in float64 where PyTorch does."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with _InFloat64():
        exact: PreTrainedModel = AutoModelForCausalLM.from_config(
            model.config, dtype=torch.float64, **eager
        )
    exact.load_state_dict(model.state_dict())
    return exact.double().eval()


def judged_results(module: nn.Module, x: torch.Tensor) -> Judged:
    """Return what a module of float32 makes of x."""
    with torch.no_grad():
        return Judged(module(x), copy.deepcopy(module).double()(x.double()))


def judged_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Judged:
    """Return the logits [num_tokens, vocab_size] behind each of the tokens."""
    ids = torch.tensor([list(token_ids)])
    with torch.inference_mode():
        theirs = model(ids, use_cache=False).logits[0].float()
        exact = _in_float64(model)
        with _InFloat64():
            logits = exact(ids, use_cache=False).logits[0]
    assert logits.dtype == torch.float64
    return Judged(theirs, logits)
