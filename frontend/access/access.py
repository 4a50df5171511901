"""The check of API keys. Without a key in the configuration there is none."""

import hmac
import logging
from collections.abc import Mapping

from tandem.frontend.access.keys import ApiKey, Scope, digest_of, read_keys
from tandem.frontend.access.limits import Client
from tandem.frontend.config import FrontendConfig
from tandem.frontend.openai.errors import ForbiddenError, UnauthorizedError
from tandem.frontend.ui.files import PAGE_PATHS

logger = logging.getLogger(__name__)

_MAX_KEY_BYTES = 512
_BEARER = b"bearer "
_SCOPES: dict[str, Scope] = {"/metrics": "metrics", "/metrics/targets": "metrics"}
_PAGE = "/ui/"  # and all below it, but for the files
# for probes, which have no key, and for a browser before it has one
_OPEN_PATHS = frozenset({"/live", "/health"}) | PAGE_PATHS


class Access:
    """The keys that are valid now, and a client for each."""

    def __init__(self, config: FrontendConfig) -> None:
        """Read the keys. Raises ConfigError naming the list at fault."""
        self._config = config
        self._clients: dict[bytes, Client] = {}  # by the key's hash
        self.reload()

    @property
    def files(self) -> list[str]:
        """The files to reload after a change."""
        return [self._config.api_keys_file] if self._config.api_keys_file else []

    def reload(self) -> None:
        """Read the keys again. Those whose entry is the same keep their counts.

        Raises ConfigError naming the list at fault, and changes nothing then.
        """
        keys = read_keys(self._config.api_keys, self._config.api_keys_file)
        self._clients = {key.digest: self._client(key) for key in keys}
        logger.info("%d API keys", len(keys))

    def client(self, headers: Mapping[bytes, bytes], path: str) -> Client | None:
        """Return the client of a request; None for a path that is open to all.

        Raises UnauthorizedError without a valid key, ForbiddenError without the path's scope.
        """
        if path in _OPEN_PATHS:
            return None
        client = self._holder(_key_in(headers))
        scope = "operator" if path.startswith(_PAGE) else _SCOPES.get(path)
        if scope is not None and scope not in client.key.scopes:
            raise ForbiddenError(
                f"the key {client.key.name!r} lacks the option `{scope}`, which this path needs"
            )
        return client

    def _holder(self, key: bytes) -> Client:
        """Return the holder of a key. The time of a look-up by hash tells nothing of a key."""
        digest = digest_of(key)
        client = self._clients.get(digest)
        if client is None or not hmac.compare_digest(client.key.digest, digest):
            raise UnauthorizedError("the API key is not valid")
        return client

    def _client(self, key: ApiKey) -> Client:
        present = self._clients.get(key.digest)
        return present if present is not None and present.key == key else Client(key)


def _key_in(headers: Mapping[bytes, bytes]) -> bytes:
    given = headers.get(b"authorization", b"")
    is_bearer = given[: len(_BEARER)].lower() == _BEARER
    key = given[len(_BEARER) :] if is_bearer else headers.get(b"x-api-key", b"")
    key = key.strip()
    if not key:
        raise UnauthorizedError(
            "an API key is required, as `Authorization: Bearer KEY` or `x-api-key: KEY`"
        )
    if len(key) > _MAX_KEY_BYTES:
        raise UnauthorizedError("the API key is not valid")
    return key


def new_access(config: FrontendConfig) -> Access | None:
    """Return the check of keys; None where the configuration lists no key and no file."""
    return Access(config) if config.api_keys or config.api_keys_file else None
