"""Counts the kernels that are built while a worker serves: each stops every answer for seconds."""

import logging
from collections.abc import Callable
from typing import Any

from tandem.runtime.process.metrics import counter

logger = logging.getLogger(__name__)


def listen_to_builds(on_build: Callable[[str], None] | None) -> None:
    """Call `on_build` with a line about each kernel that this process builds or loads from now on.

    None ends it. It is called within the launch: an error of it would be the launch's.
    """
    # Imported here: a worker without a GPU may have no Triton.
    import triton

    def listener(*, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
        assert on_build is not None
        how = "loaded from the cache" if cache_hit else "built"
        constants = ", ".join(map(str, src.constants.values()))
        on_build(f"{src.name} was {how} in {times.total / 1e6:.2f} s ({constants[:500]})")

    # Not the hooks of triton.knobs.runtime, which turn every constant to JSON: ours are dataclasses
    triton.knobs.compilation.listener = None if on_build is None else listener


class KernelBuilds:
    """The metric of kernels built while serving."""

    def __init__(self) -> None:
        self._built = counter("kernels_built_while_serving", "Kernels built by a ready worker")

    def count(self) -> None:
        """Count and log the kernels that Triton builds, or loads from its cache, from now on."""
        listen_to_builds(self._on_build)

    def _on_build(self, line: str) -> None:
        self._built.inc()
        logger.warning("while serving, kernel %s", line)
