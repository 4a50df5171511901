"""Which layers of which prompts are in the pool while their step is still computed."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.engine.sequence import Chunk, LayerProgress, layer_boundaries

if TYPE_CHECKING:
    import torch

LayersListener = Callable[[list[LayerProgress]], None]


class LayerStream:
    """Turns a runner's news of layers, for the whole step, into news of single prompts.

    False when no chunk of the step asks for them. A prompt's last group of layers is left out:
    its news is the sequence's output.
    """

    def __init__(self, chunks: list[Chunk], num_layers: int, listener: LayersListener) -> None:
        self._listener = listener
        self._prompts = [
            (chunk, layer_boundaries(num_layers, chunk.seq.num_layer_groups)[:-1])
            for chunk in chunks
            if chunk.seq.num_layer_groups > 1 and chunk.seq.prefill_only and chunk.samples
        ]
        # Of layers, ascending; of all prompts.
        self.boundaries = tuple(sorted({each for _, ends in self._prompts for each in ends}))

    def __bool__(self) -> bool:
        return bool(self.boundaries)

    def __call__(self, num_layers: int, event: "torch.cuda.Event | None") -> None:
        self._listener(
            [
                LayerProgress(chunk.seq.request_id, chunk.end, num_layers, event)
                for chunk, boundaries in self._prompts
                if num_layers in boundaries
            ]
        )
