"""The seam between the engine and its model: steps that a runner launches."""

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Protocol

from tandem.engine.config import DeviceKind
from tandem.engine.schedule.sequence import Chunk, OnLayers

if TYPE_CHECKING:
    from tandem.engine.architecture.config import ModelConfig
    from tandem.engine.memory.kv_blocks import KvBlocks
    from tandem.engine.step.outcome import SampledToken, ScoredPart


class Step(Protocol):
    """A launched step, under way or done."""

    @property
    def seconds(self) -> float:
        """The time that the device took; valid after `tokens`."""

    def tokens(self) -> "list[SampledToken]":
        """Return one token per chunk that samples, in the order of the chunks.

        Blocks until the tokens are on the host and all K/V of the step is in the pool. Raises
        UndrawnError, with the tokens of the other chunks, or the error of the whole step; nothing
        of the step is under way then either.
        """

    def prompt_scores(self) -> "list[ScoredPart]":
        """Return the log probabilities of prompt tokens that were asked for; after `tokens`."""


class Runner(Protocol):
    """The model, or a stand-in for it: computes steps on one or more ranks."""

    model_config: "ModelConfig"
    device_kind: DeviceKind

    @property
    def kv_caches(self) -> "SequenceOf[KvBlocks]":
        """One pool per rank; all have the same blocks."""

    def launch(
        self,
        chunks: list[Chunk],
        on_layers: OnLayers | None = None,
        boundaries: Collection[int] = (),
    ) -> Step:
        """Begin to compute `chunks` after all earlier steps, without waiting for those.

        While this runs, `token_ids` of a chunk that samples ends at the chunk's end: the token that
        this step draws is not among them, those that earlier steps draw are PENDING. Sequences,
        batch rows and tables may change as soon as it returns. `on_layers` is called for each of
        `boundaries` before it returns. When it raises, nothing of the step is under way: the
        chunks' blocks may be reused, and the chunks launched again, at once.
        """
