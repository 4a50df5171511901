"""The seam between a step and the decoder that computes it, whichever code that is."""

from collections.abc import Callable, Collection
from typing import Protocol

import torch

from tandem.engine.batch.batch import Batch


class AnyModel(Protocol):
    """A decoder by either code; the methods are described at tandem.engine.decoder.decoder."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of rows of `hidden`."""

    def hidden(
        self,
        batch: Batch,
        kv_cache: torch.Tensor,
        on_layers: Callable[[int], None] | None = None,
        boundaries: Collection[int] = (),
        *,
        of_all: bool = False,
    ) -> torch.Tensor:
        """Return the operands of `logits`; fill the cache."""
