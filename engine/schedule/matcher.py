"""The seam between a sequence and the grammar that its answer follows."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]


class Matcher(Protocol):
    """The tokens that may follow an answer, by its grammar. For one engine thread."""

    num_tokens: int  # of the answer, handed over by `begin` or before
    # Tokens that follow one after another with no choice, valid as `mask` is, which allows the
    # first alone. There may be more of them. `begin` may get some or all of them.
    forced: list[int]

    def begin(self, new_tokens: list[int]) -> None:
        """Begin to compute the mask behind `new_tokens`, unless it has been begun or is there."""

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the mask; False: it is not ready in time."""

    def mask(self) -> Words:
        """Return the mask, int32 [ceil(vocab_size / 32)], valid until `begin`; bit i is token i.

        Raises the TandemError for which the answer cannot go on.
        """
