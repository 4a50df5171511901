"""Requests that a stranger's page makes in a user's browser."""

import itertools
from typing import Any

import pytest
from pydantic import ValidationError

from tandem.frontend.access.browsers import new_guard
from tandem.frontend.config import FrontendConfig
from tandem.frontend.errors import ForbiddenError
from tests.frontend.access.test_access import BODY, entry
from tests.frontend.frontend_stack import Stack

OWN = [
    "", "localhost", "LOCALHOST:8000", "localhost.:8000", "app.localhost:3000", "127.0.0.1:8000",
    "127.0.0.9", "[::1]:8000", "[::1]", "192.168.1.5:8000", "host.docker.internal:8000",
]  # fmt: skip
STRANGE = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
    "evil.example.", "[::1", "[::1]evil.example", "2130706433", "0x7f.1", "tandem", "-", "\xff",
    "evillocalhost", "api.example.org.evil.example", "a b",
]  # fmt: skip
LISTED = ["api.example.org", "API.example.org:443", "gpu-1:8000"]


def is_allowed(config: FrontendConfig, method: str = "POST", **headers: str) -> bool:
    guard = new_guard(config)
    given = {
        name.replace("_", "-").encode(): value.encode("latin-1") for name, value in headers.items()
    }
    try:
        for _ in range(2):  # what was allowed once is known
            if guard is not None:
                guard.check(method, given)
    except ForbiddenError:
        return False
    return True


@pytest.mark.parametrize(
    ("fields", "allowed", "refused"),
    [
        ({}, OWN, STRANGE + LISTED),
        ({"host": "::1"}, OWN, STRANGE + LISTED),
        ({"host": "localhost"}, OWN, STRANGE + LISTED),
        ({"allowed_hosts": "api.example.org, GPU-1"}, OWN + LISTED, STRANGE),
        ({"host": "0.0.0.0", "allowed_hosts": "api.example.org, gpu-1"}, OWN + LISTED, STRANGE),
        ({"api_keys": entry("a"), "allowed_hosts": "api.example.org,gpu-1"}, OWN + LISTED, STRANGE),
        ({"allowed_hosts": "*"}, OWN + LISTED + STRANGE, []),
        ({"host": "0.0.0.0"}, OWN + LISTED + STRANGE, []),
        ({"host": "10.0.0.7"}, OWN + LISTED + STRANGE, []),
        ({"api_keys": entry("a")}, OWN + LISTED + STRANGE, []),
    ],
)
def test_a_host_is_a_known_name_or_an_address(
    fields: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    config = FrontendConfig(**fields)
    assert [host for host in allowed if not is_allowed(config, host=host)] == []
    assert [host for host in refused if is_allowed(config, host=host)] == []


def test_hosts_that_were_allowed_are_remembered_within_bounds() -> None:
    guard = new_guard(FrontendConfig())
    assert guard is not None
    for port in range(1000):
        guard.check("GET", {b"host": b"localhost:%d" % port})
    assert len(guard._known) <= 64


@pytest.mark.parametrize("origins", ["", "https://app.example.org", "*"])
@pytest.mark.parametrize("with_keys", [False, True])
def test_a_page_of_another_origin_asks_only_where_its_origin_is_listed(
    origins: str, with_keys: bool
) -> None:
    keys = entry("alice") if with_keys else ""
    config = FrontendConfig(cors_origins=origins, api_keys=keys)
    for method, site, mode, origin in itertools.product(
        ("GET", "POST", "PUT", "DELETE"),
        ("cross-site", "same-site", "same-origin", "none", "new-word"),
        ("navigate", "no-cors", "cors"),
        ("", "null", "https://app.example.org", "https://evil.example"),
    ):
        headers = {"host": "localhost", "sec_fetch_site": site, "sec_fetch_mode": mode}
        if origin:
            headers["origin"] = origin
        is_own = site in ("same-origin", "none")
        is_link = method == "GET" and mode == "navigate"
        is_listed = origins == "*" or (origins != "" and origin == origins)
        expected = with_keys or is_own or is_link or is_listed
        assert is_allowed(config, method, **headers) == expected, headers
    assert is_allowed(config, host="localhost", origin="https://evil.example")  # no browser


@pytest.mark.parametrize("hosts", ["http://a", "a:80", "a/b", "*.example.org", "a b"])
def test_a_list_of_hosts_has_names_alone(hosts: str) -> None:
    with pytest.raises(ValidationError, match="without scheme and port"):
        FrontendConfig(allowed_hosts=hosts)


async def test_no_path_answers_a_strangers_page(stack: Stack) -> None:
    paths = [
        "/live", "/health", "/metrics", "/metrics/targets", "/v1/models", "/v1/responses/x",
        "/version", "/ui", "/ui/states", "/nothing", *stack.server.handler.apis,
    ]  # fmt: skip
    pages = [
        ({"host": "evil.example", "origin": "http://evil.example"}, "frontend.allowed_hosts"),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, "frontend.cors_origins"),
    ]
    for path in paths:
        method = "POST" if path in stack.server.handler.apis else "GET"
        for headers, setting in pages:
            refused = await stack.http.request(method, path, headers=headers, json=BODY)
            assert refused.status_code == 403, path
            assert setting in refused.text
    assert not stack.worker.requests
    assert (await stack.chat()).status_code == 200
