"""Names that people type: variables of config keys, and the known name nearest to a wrong one."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tandem.runtime.errors import ConfigError

VARIABLE_PREFIX = "TANDEM_"
_SEPARATOR = "__"
_NONE_WORDS = ("null", "none", "~", "")
_URL_SCHEMES = {"NATS_SERVER": "nats", "ETCD_ENDPOINTS": "http"}
_DYNAMO_LEVELS = {"trace": "debug", "warn": "warning", "off": "error"}

# Variables that Tandem shares with Dynamo and other clients, and the keys that they set.
SHARED_VARIABLES = {
    "NATS_SERVER": "runtime.nats_url",
    "ETCD_ENDPOINTS": "runtime.etcd_endpoints",
    "DYN_LOG": "runtime.log_level",
}


def variable_name(key: str) -> str:
    """Return the environment variable of a config key: TANDEM_SECTION__KEY."""
    return VARIABLE_PREFIX + key.replace(".", _SEPARATOR).upper()


def is_config_variable(name: str) -> bool:
    """Return True for a variable that may set a config key."""
    return name.startswith(VARIABLE_PREFIX) or name in SHARED_VARIABLES


def config_variables(
    environment: Mapping[str, str], sections: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield (config key, variable, text), weakest first.

    Shared variables come before those named TANDEM_SECTION__KEY. Raise ConfigError for
    TANDEM_SECTION_KEY of one of `sections`: an underscore is missing.
    """
    for variable, key in SHARED_VARIABLES.items():
        if text := environment.get(variable, "").strip():
            yield key, variable, _shared_text(variable, text)
    for variable in sorted(name for name in environment if name.startswith(VARIABLE_PREFIX)):
        name = variable.removeprefix(VARIABLE_PREFIX).lower()
        section, separator, key = name.partition(_SEPARATOR)
        for meant in sections:
            if name.startswith(f"{meant}_") and section != meant:
                right = variable_name(f"{meant}.{name.removeprefix(f'{meant}_')}")
                hint = f"environment variable {variable}: did you mean {right}?"
                raise ConfigError(hint, param=variable)
        if separator:
            yield f"{section}.{key}", variable, environment[variable]


def _shared_text(variable: str, text: str) -> str:
    """Return the text of a shared variable as its key takes it."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if scheme := _URL_SCHEMES.get(variable):
        return ",".join(url if "://" in url else f"{scheme}://{url}" for url in parts)
    levels = [part.lower() for part in parts if "=" not in part]  # `debug,some_module=trace`
    level = levels[-1] if levels else "info"
    return _DYNAMO_LEVELS.get(level, level)


def means_none(text: str) -> bool:
    """Return True for text that clears a value which may be empty: `null`, `none`, `~`, nothing."""
    return text.strip().lower() in _NONE_WORDS


def nearest(word: str, known: Iterable[str], similarity: float = 0.5) -> str | None:
    """Return the known word most like `word`, None when none is similar enough (0 to 1)."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=similarity)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `did you mean X?` for the nearest known word, else the list of known words."""
    words = list(known)
    if found := nearest(word, words):
        return f"did you mean {found}?"
    return f"known are {', '.join(words)}" if words else "there are none"
