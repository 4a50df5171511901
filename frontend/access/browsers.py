"""Requests that a stranger's web page makes in the browser of a user who reaches the frontend.

With API keys such a page is harmless, for it has none.
"""

import ipaddress
import re
from collections.abc import Mapping

from tandem.frontend.config import ANY, FrontendConfig, listed
from tandem.frontend.errors import ForbiddenError
from tandem.runtime.printable import short

# As containers call their host. No stranger's page can be under these names.
_LOCAL_NAMES = frozenset({"localhost", "host.docker.internal", "host.containers.internal"})
_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:@/]*))(?::\d*)?")
_OWN_SITES = (b"same-origin", b"none")  # none: the user's own act
_MAX_KNOWN = 64
_Headers = Mapping[bytes, bytes]


class BrowserGuard:
    """The hosts that requests may name, and the origins whose pages may make them."""

    def __init__(self, config: FrontendConfig) -> None:
        names = listed(config.allowed_hosts)
        has_check = names or (not config.asks_for_keys and _is_loopback(config.host))
        self._names = _LOCAL_NAMES | names if has_check and ANY not in names else None
        self._origins = None if config.asks_for_keys else listed(config.cors_origins)
        self._known: set[bytes] = set()  # values of `Host` that are allowed

    def check(self, method: str, headers: _Headers) -> None:
        """Raise ForbiddenError for a request of a stranger's page."""
        if self._names is not None:
            host = headers.get(b"host", b"")
            if host not in self._known:
                self._check_host(host, self._names)
        if b"sec-fetch-site" in headers and self._origins is not None:
            self._check_origin(method, headers, self._origins)

    def _check_host(self, host: bytes, names: frozenset[str]) -> None:
        """Raise ForbiddenError for a name that may be a stranger's, which leads here.

        The stranger's page would be of the same origin then (DNS rebinding). An address is no name.
        """
        name = _name_in(host)
        if name and not _is_address(name) and not name.endswith(".localhost") and name not in names:
            raise ForbiddenError(
                f"this frontend has no name {short(name)!r} (`Host`): ask for it by its address, "
                "or list the name in `frontend.allowed_hosts`"
            )
        if len(self._known) < _MAX_KNOWN:
            self._known.add(host)

    def _check_origin(self, method: str, headers: _Headers, origins: frozenset[str]) -> None:
        """Raise ForbiddenError for a page of another origin, unless the browser only goes here.

        A page sees nothing of where its links lead, nor of the frames in it.
        """
        if headers[b"sec-fetch-site"] in _OWN_SITES:
            return
        if method in ("GET", "HEAD") and headers.get(b"sec-fetch-mode") == b"navigate":
            return
        origin = headers.get(b"origin", b"").decode("latin-1")
        if ANY not in origins and origin not in origins:
            raise ForbiddenError(
                f"a web page of another origin ({short(origin) or 'unknown'}) may not ask this "
                "frontend: list its origin in `frontend.cors_origins`"
            )


def _name_in(host: bytes) -> str:
    """Return the name or address in a `Host` header, in small letters; all of it if malformed."""
    text = host.decode("latin-1").lower()
    found = _HOST.fullmatch(text)
    return text if found is None else (found[1] or found[2]).removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def new_guard(config: FrontendConfig) -> BrowserGuard | None:
    """Return the check of a frontend; None where no web page can do harm."""
    return BrowserGuard(config) if config.allowed_hosts or not config.asks_for_keys else None
