"""Configs for tests, from the flags of a command line."""

from tandem.config.flags import split_flags
from tandem.config.model import EffectiveConfig, load_config


def config_of(*flags: str) -> EffectiveConfig:
    """Return the defaults with `--section.key=value` flags on top."""
    rest, parsed = split_flags(list(flags))
    assert not rest
    return load_config(flags=parsed)
