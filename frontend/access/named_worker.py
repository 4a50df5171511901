"""The worker that the cluster's endpoint picker has chosen for a request, in a header."""

import hmac
from collections.abc import Mapping

from pydantic import SecretStr

HEADER = "x-tandem-worker"
_KEY = HEADER.encode()
_MAX_HEADER_BYTES = 256


class NamedWorkers:
    """Writes and reads the header `INSTANCE_ID MAC`: its MAC proves the cluster token.

    So no client can name a worker. Without a token, as everywhere, there is no MAC.
    """

    def __init__(self, token: SecretStr | None) -> None:
        self._token = None if token is None else token.get_secret_value().encode()

    def header(self, instance_id: str) -> str:
        """Return the value of the header for a worker."""
        return instance_id if self._token is None else f"{instance_id} {self._mac(instance_id)}"

    def named_in(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the worker that a request names; empty without one, or with a wrong MAC."""
        given = headers.get(_KEY, b"")
        if not given or len(given) > _MAX_HEADER_BYTES:
            return ""
        instance_id = given.decode("latin-1").partition(" ")[0]
        is_ours = hmac.compare_digest(given, self.header(instance_id).encode())
        return instance_id if is_ours else ""

    def _mac(self, instance_id: str) -> str:
        assert self._token is not None
        signed = b"tandem named worker\0" + instance_id.encode()
        return hmac.digest(self._token, signed, "sha256").hex()
