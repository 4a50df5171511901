"""Flags of config keys on a command line. Imports nothing heavy, so that help is instant."""

from typing import NamedTuple

from tandem.runtime.errors import ConfigError


class Flag(NamedTuple):
    """`--section.key=value`, as typed."""

    name: str  # --section.key
    value: str

    @property
    def path(self) -> str:
        return self.name.removeprefix("--")

    @property
    def section(self) -> str:
        return self.path.partition(".")[0]


def split_flags(words: list[str]) -> tuple[list[str], list[Flag]]:
    """Separate `--section.key=value` and `--section.key value` from the other words.

    Raise ConfigError for a flag without a value.
    """
    rest: list[str] = []
    flags: list[Flag] = []
    remaining = iter(words)
    for word in remaining:
        name, has_value, value = word.partition("=")
        if not name.startswith("--") or "." not in name:
            rest.append(word)
            continue
        if not has_value:
            value = next(remaining, "--")
            if value.startswith("--"):
                raise ConfigError(f"{name} needs a value: {name}=VALUE", param=name)
        flags.append(Flag(name, value))
    return rest, flags
