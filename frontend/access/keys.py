"""API keys as the configuration lists them: names, hashes, limits and scopes."""

import hashlib
import re
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from tandem.runtime.errors import ConfigError
from tandem.runtime.printable import short
from tandem.runtime.wire.bounds import LARGEST_INT

Scope = Literal["operator", "metrics"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
MAX_KEYS = 10_000
MAX_LIST_BYTES = 4 * 1024 * 1024
_ENTRY_ENDS = re.compile(r"[\n;]")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_LIMIT = re.compile(r"(requests|tokens)_per_minute=([1-9][0-9]{0,9})")


class ApiKey(NamedTuple):
    """A key, of which only the SHA-256 is known. A limit of None is no limit."""

    name: str
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    scopes: frozenset[Scope] = frozenset()  # beside the models, which every key may use


def digest_of(key: bytes) -> bytes:
    """Return the hash of a key, which has so much entropy that no salt is needed."""
    return hashlib.sha256(key).digest()


def read_keys(text: str, file: str | None) -> list[ApiKey]:
    """Return the keys of `frontend.api_keys` and of the file. Raises ConfigError naming either."""
    keys = parse_keys(text, "frontend.api_keys")
    if file is not None:
        keys += parse_keys(_contents(file), f"frontend.api_keys_file: {file}")
    for values in ([key.name for key in keys], [key.digest for key in keys]):
        if len(set(values)) < len(values):
            raise _wrong("frontend.api_keys", "two keys have the same name, or the same hash")
    return keys


def parse_keys(text: str, where: str) -> list[ApiKey]:
    """Return the keys of a list, which has one per line. Raises ConfigError naming `where`."""
    lines = [line.partition("#")[0].split() for line in _ENTRY_ENDS.split(text)]
    keys = [
        _parse_key(words, f"{where}: entry {number}")
        for number, words in enumerate(lines, 1)
        if words
    ]
    if len(keys) > MAX_KEYS:
        raise _wrong(where, f"{len(keys)} keys, the most is {MAX_KEYS}")
    return keys


def _parse_key(words: list[str], where: str) -> ApiKey:
    name, digest, *options = [*words, ""][: max(2, len(words))]
    if not _NAME.fullmatch(name):
        raise _wrong(where, f"the name {short(name)!r} must be 1 to 64 of A-Z a-z 0-9 . _ -")
    if not _DIGEST.fullmatch(digest):
        raise _wrong(where, f"the key {name!r} needs its SHA-256, 64 hexadecimal digits")
    limits: dict[str, int] = {}
    for option in options:
        found = _LIMIT.fullmatch(option)
        if found is not None and int(found[2]) <= LARGEST_INT:
            limits[f"{found[1]}_per_minute"] = int(found[2])
        elif option not in SCOPES:
            known = ", ".join(("requests_per_minute=N", "tokens_per_minute=N", *SCOPES))
            raise _wrong(where, f"{short(option)!r} is none of {known}")
    scopes = frozenset(scope for scope in SCOPES if scope in options)
    return ApiKey(name, bytes.fromhex(digest), scopes=scopes, **limits)


def _contents(file: str) -> str:
    try:
        with Path(file).open("rb") as opened:
            data = opened.read(MAX_LIST_BYTES + 1)
    except OSError as error:
        raise _wrong("frontend.api_keys_file", f"cannot read {file}: {error.strerror}") from error
    if len(data) > MAX_LIST_BYTES:
        raise _wrong("frontend.api_keys_file", f"{file} is over {MAX_LIST_BYTES} bytes")
    return data.decode("utf-8", "replace")


def _wrong(where: str, reason: str) -> ConfigError:
    return ConfigError(f"{where}: {reason}", param=where.partition(":")[0])
