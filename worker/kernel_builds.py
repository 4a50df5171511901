"""Counts the kernels that are built while a worker serves: each stops every answer for seconds."""

import logging
from typing import Any

from tandem.runtime.metrics import counter

logger = logging.getLogger(__name__)


class KernelBuilds:
    """The metric of kernels built while serving."""

    def __init__(self) -> None:
        self._built = counter("kernels_built_while_serving", "Kernels built by a ready worker")

    def count(self) -> None:
        """Count and log the kernels that Triton builds, or loads from its cache, from now on."""
        # Imported here: a worker without a GPU may have no Triton.
        import triton

        triton.knobs.runtime.jit_post_compile_hook = self._on_build

    def _on_build(self, *, fn: Any, repr: str, **_: object) -> None:
        self._built.inc()
        logger.warning("kernel %s was built while serving: %s", fn.name, repr)
