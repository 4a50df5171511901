"""Access to a frontend: by an API key, or where there are none, for all but strangers' web pages.

The live page has a key of its own then.
"""

import hmac
import logging
from collections.abc import Collection, Mapping

from tandem.frontend.access.browsers import new_guard
from tandem.frontend.access.keys import ApiKey, Scope, digest_of, read_keys
from tandem.frontend.access.limits import Client
from tandem.frontend.config import FrontendConfig
from tandem.frontend.errors import ForbiddenError, UnauthorizedError
from tandem.frontend.ui.page.files import PAGE_PATHS

logger = logging.getLogger(__name__)

_MAX_KEY_BYTES = 512
_NO_API_KEY = "an API key is required, as `Authorization: Bearer KEY` or `x-api-key: KEY`"
_NO_PAGE_KEY = (
    "the live page needs its key: open it by the link that `tandem serve` printed, or the "
    "frontend's log has, or configure API keys"
)
_BEARER = b"bearer "
_SCOPES: dict[str, Scope] = {"/metrics": "metrics", "/metrics/targets": "metrics"}
_PAGE = "/ui/"  # all below it, but for the files
_PAGE_KEY_NAME = "page-key"
# for probes, which have no key, and for a browser before it has one
_OPEN_PATHS = frozenset({"/live", "/health", _PAGE}) | PAGE_PATHS


class Access:
    """The keys that are valid now with a client for each, and the check of web pages."""

    def __init__(self, config: FrontendConfig) -> None:
        """Read the keys. Raises ConfigError naming the list at fault."""
        self._config = config
        self._guard = new_guard(config)
        self._is_for_page = not config.asks_for_keys
        self._clients: dict[bytes, Client] = {}  # by the key's hash
        self.reload()

    @property
    def clients(self) -> Collection[Client]:
        """The holders of the keys that are valid now."""
        return self._clients.values()

    @property
    def files(self) -> list[str]:
        """The files to reload after a change."""
        return [self._config.api_keys_file] if self._config.api_keys_file else []

    def reload(self) -> None:
        """Read the keys again. Those whose entry is the same keep their counts.

        Raises ConfigError naming the list at fault, and changes nothing then.
        """
        keys = _page_keys(self._config) if self._is_for_page else _api_keys(self._config)
        self._clients = {key.digest: self._client(key) for key in keys}

    def client(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> Client | None:
        """Return the client of a request; None for a path that is open to all.

        Raises UnauthorizedError without a valid key, ForbiddenError without the path's scope or
        for a stranger's page.
        """
        if self._guard is not None:
            self._guard.check(method, headers)
        if path in _OPEN_PATHS or (
            self._is_for_page and not (self._clients and path.startswith(_PAGE))
        ):
            return None
        client = self._holder(headers)
        scope = "operator" if path.startswith(_PAGE) else _SCOPES.get(path)
        if scope is not None and scope not in client.key.scopes:
            raise ForbiddenError(
                f"the key {client.key.name!r} lacks the option `{scope}`, which this path needs"
            )
        return client

    def _holder(self, headers: Mapping[bytes, bytes]) -> Client:
        """Return the holder of a key. The time of a look-up by hash tells nothing of a key."""
        key = _key_in(headers)
        if not key:
            raise UnauthorizedError(_NO_PAGE_KEY if self._is_for_page else _NO_API_KEY)
        digest = digest_of(key)
        client = self._clients.get(digest)
        if client is None or not hmac.compare_digest(client.key.digest, digest):
            kind = "key of the live page" if self._is_for_page else "API key"
            raise UnauthorizedError(f"the {kind} is not valid")
        return client

    def _client(self, key: ApiKey) -> Client:
        present = self._clients.get(key.digest)
        return present if present is not None and present.key == key else Client(key)


def _api_keys(config: FrontendConfig) -> list[ApiKey]:
    keys = read_keys(config.api_keys, config.api_keys_file)
    logger.info("%d API keys", len(keys))
    return keys


def _page_keys(config: FrontendConfig) -> list[ApiKey]:
    if config.page_key is None:
        return []
    digest = digest_of(config.page_key.get_secret_value().encode())
    return [ApiKey(_PAGE_KEY_NAME, digest, scopes=frozenset({"operator"}))]


def _key_in(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the key of a request; as much of it as tells that it is too long."""
    given = headers.get(b"authorization", b"")
    is_bearer = given[: len(_BEARER)].lower() == _BEARER
    key = given[len(_BEARER) :] if is_bearer else headers.get(b"x-api-key", b"")
    return key.strip()[: _MAX_KEY_BYTES + 1]
