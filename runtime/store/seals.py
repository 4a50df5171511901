"""Values in etcd that send prompts somewhere carry a MAC under the cluster token.

    value \\n HMAC-SHA256 of key and value, hex

Write access to etcd is therefore not enough to make a process dial another address. The live config
carries no MAC: write access to etcd is enough to set thresholds.
"""

import hmac
import logging

from pydantic import SecretStr

logger = logging.getLogger(__name__)

_SEALED = ("instances", "models", "transfer")  # /tandem/{namespace}/{this}/...
_MAC_CHARS = 64


class Seals:
    """Seals the values of a cluster; without a token a value is its own seal."""

    def __init__(self, token: SecretStr | None) -> None:
        self._token = token.get_secret_value().encode() if token is not None else None

    def seal(self, key: str, value: bytes) -> bytes:
        """Return the value as it is stored."""
        if self._token is None or not _is_sealed(key):
            return value
        return value + b"\n" + self._mac(key, value)

    def opened(self, key: str, stored: bytes) -> bytes | None:
        """Return a stored value. None, with a line in the log, without the right MAC."""
        if not _is_sealed(key):
            return stored
        value, newline, mac = stored.rpartition(b"\n")
        has_mac = bool(newline) and len(mac) == _MAC_CHARS
        if self._token is None and not has_mac:
            return stored
        if self._token is not None and has_mac and hmac.compare_digest(mac, self._mac(key, value)):
            return value
        logger.warning("ignoring %s: it was not written with this process's cluster token", key)
        return None

    def _mac(self, key: str, value: bytes) -> bytes:
        assert self._token is not None
        signed = b"\0".join((b"tandem record", key.encode(), value))
        return hmac.digest(self._token, signed, "sha256").hex().encode()


def _is_sealed(key: str) -> bool:
    parts = key.split("/", 4)
    return len(parts) > 4 and parts[1] == "tandem" and parts[3] in _SEALED
