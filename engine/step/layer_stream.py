"""The layers of prompts that are in the pool while their step is still computed."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.engine.schedule.sequence import (
    Chunk,
    LayerProgress,
    Sequence,
    SequenceStatus,
    layer_boundaries,
)

if TYPE_CHECKING:
    import torch

LayersListener = Callable[[list[LayerProgress]], None]


class LayerStream:
    """Turns a step's progress by layers, from the runner, into the progress of single prompts.

    False when no chunk of the step asks for it. A prompt's last group of layers is left out: the
    sequence's output announces it. While `held`, progress waits for `release`: the outputs of the
    step before, with the progress of the same prompts' heads, must come first.
    """

    def __init__(
        self, chunks: list[Chunk], num_layers: int, listener: LayersListener, *, held: bool = False
    ) -> None:
        self._listener = listener
        self._held: list[tuple[int, torch.cuda.Event | None]] | None = [] if held else None
        self._prompts = [
            (chunk, layer_boundaries(num_layers, chunk.seq.num_layer_groups)[:-1])
            for chunk in chunks
            if chunk.seq.num_layer_groups > 1 and chunk.seq.prefill_only and chunk.samples
        ]
        self.announced: set[Sequence] = set()
        # Numbers of layers, ascending, of all prompts.
        self.boundaries = tuple(sorted({each for _, ends in self._prompts for each in ends}))

    def __bool__(self) -> bool:
        return bool(self.boundaries)

    def __call__(self, num_layers: int, event: "torch.cuda.Event | None") -> None:
        if self._held is None:
            self._announce(num_layers, event)
        else:
            self._held.append((num_layers, event))

    def release(self) -> None:
        """Announce the held progress; further progress is announced at once."""
        held, self._held = self._held or [], None
        for num_layers, event in held:
            self._announce(num_layers, event)

    def _announce(self, num_layers: int, event: "torch.cuda.Event | None") -> None:
        chunks = [
            chunk
            for chunk, boundaries in self._prompts
            if num_layers in boundaries and chunk.seq.status is SequenceStatus.RUNNING
        ]
        if chunks:
            self.announced.update(chunk.seq for chunk in chunks)
            self._listener(
                [
                    LayerProgress(chunk.seq.request_id, chunk.end, num_layers, event)
                    for chunk in chunks
                ]
            )
