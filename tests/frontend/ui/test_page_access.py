"""Who may open the page, and change the cluster by it."""

import logging
import re
from unittest.mock import Mock

import httpx
import pytest
from pydantic import ValidationError

from tandem.frontend.config import FrontendConfig
from tandem.frontend.ui import pages
from tandem.frontend.ui.page.files import PAGE_PATHS
from tandem.runtime.store.discovery import config_key
from tests.frontend.access.test_access import bearer, entry
from tests.frontend.frontend_stack import Stack
from tests.frontend.ui.page_stack import KEY, anext_state, page_config, page_stack, states


def guarded() -> list[tuple[str, str]]:
    """Method and path of everything of the page but its files."""
    routes = pages.Pages(Mock(), Mock(), Mock(max_pages=1), None).routes()
    return [
        (method, re.sub(r"{\w+}", "x", route.path))
        for route in routes
        for method in sorted(route.methods or ())
        if route.path not in PAGE_PATHS and method != "HEAD"
    ]


STRANGERS = [
    {},
    {"authorization": "Bearer another-key-of-a-page"},
    {"authorization": "Basic eA=="},
    {"x-api-key": KEY[:-1]},
    {"cookie": f"key={KEY}"},
    {"host": "127.0.0.1:8000"},  # as a proxy sends by default
    {"x-forwarded-for": "203.0.113.7"},
]


async def test_without_api_keys_only_the_key_of_the_page_opens_it(page: Stack) -> None:
    async with httpx.AsyncClient(base_url=page.url, timeout=60, verify=False) as other:
        for path in PAGE_PATHS:
            assert (await other.get(path)).status_code == 200
        assert (await other.get("/ui/")).headers["location"] == f"{page.url}/ui"
        for method, path in guarded():
            for headers in STRANGERS:
                refused = await other.request(method, path, headers=headers)
                assert refused.status_code == 401, (path, headers)
                assert "live page" in refused.json()["error"]["message"]
            opened = {"authorization": f"Bearer {KEY}"}
            async with other.stream(method, path, headers=opened) as response:
                assert response.status_code not in (401, 403), path
        assert not page.store.items.keys() & {config_key("tandem", "disagg.policy")}
        assert (await other.get("/v1/models")).status_code == 200


async def test_images_of_another_page_take_no_place_of_the_page() -> None:
    async with page_stack(config=page_config(max_pages=2)) as stack:
        image = {"authorization": "", "accept": "image/png"}
        for site in ({}, {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}):
            for _ in range(3):
                refused = await stack.http.get("/ui/states", headers=image | site)
                assert refused.status_code == (403 if site else 401)
        assert (await anext_state(stack))["workers"]


async def test_a_frontend_that_draws_its_key_shows_the_link_once_and_no_other_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with Stack() as stack:
        (link,) = re.findall(r"live page: (\S+)", caplog.text)
        base, _, key = link.partition("/ui#key=")
        assert base == stack.url
        async with states(stack, authorization=f"Bearer {key}") as found:
            assert await anext(found)
    caplog.clear()
    async with page_stack(), page_stack(config=FrontendConfig(port=0, api_keys=entry("alice"))):
        assert "live page" not in caplog.text and KEY not in caplog.text


@pytest.mark.parametrize("key", ["short", "a key of the page", "x" * 257, "key/of/the/page#1"])
def test_a_key_of_the_page_fits_a_link(key: str) -> None:
    with pytest.raises(ValidationError, match="16 to 256"):
        page_config().model_validate({"page_key": key})


async def test_with_keys_the_page_opens_and_all_else_needs_an_operators() -> None:
    assert ("PUT", "/ui/config/x") in guarded() and ("GET", "/ui/states") in guarded()
    keys = [entry("alice", "metrics"), entry("olga", "operator")]
    async with page_stack(config=FrontendConfig(port=0, api_keys=";".join(keys))) as stack:
        for path in PAGE_PATHS:
            assert (await stack.http.get(path)).status_code == 200
        for method, path in guarded():
            assert (await stack.http.request(method, path)).status_code == 401, path
            refused = await stack.http.request(method, path, headers=bearer("alice"))
            assert refused.status_code == 403 and "`operator`" in refused.text, path
        assert (await stack.http.get("/metrics", headers=bearer("olga"))).status_code == 403
        headers = bearer("olga") | {"host": "tandem.example.org"}
        async with states(stack, **headers) as found:
            assert (await anext(found))["workers"]


async def test_changes_count_against_the_limit_of_their_key_and_have_its_name_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    config = FrontendConfig(port=0, api_keys=entry("olga", "operator", "requests_per_minute=3"))
    changes = [each for each in guarded() if each[0] != "GET"]
    async with page_stack(config=config) as stack:

        async def status(method: str, path: str) -> int:
            return (await stack.http.request(method, path, headers=bearer("olga"))).status_code

        policy = "/ui/config/disagg.policy"
        assert await status("PUT", f"{policy}?value=threshold") == 200
        assert await status("DELETE", policy) == 200
        assert await status("PUT", "/ui/role/nobody?role=both") == 404
        for method, path in changes:
            assert await status(method, path) == 429
        assert await status("GET", "/v1/models") == 200
    assert "the page set disagg.policy to threshold, by olga" in caplog.text
    assert "the page unset disagg.policy, by olga" in caplog.text
