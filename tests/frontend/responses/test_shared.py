"""Stored responses of two frontends that share theirs, behind any balancer."""

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest

from tandem.frontend.config import FrontendConfig
from tests.frontend.frontend_stack import MODEL, Stack
from tests.services import eventually

KEYS = {name: name * 8 for name in ("alice", "bobby")}


@dataclass
class Two:
    """Two frontends of one worker."""

    first: Stack
    second: Stack


def config(**fields: object) -> FrontendConfig:
    return FrontendConfig.model_validate({"port": 0, "share_responses": True} | fields)


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    async with Stack(config()) as first:
        shared = Stack(config(), num_workers=0, store=first.store, listeners=first.listeners)
        async with shared as second:
            await eventually(lambda: second.num_known == 1)
            yield Two(first, second)


async def create(stack: Stack, text: str, previous: str | None = None) -> httpx.Response:
    body = {"model": MODEL, "input": text, "previous_response_id": previous}
    return await stack.http.post("/v1/responses", json=body)


async def test_a_response_is_shown_continued_and_deleted_at_any_frontend(two: Two) -> None:
    first = (await create(two.first, "A")).json()["id"]
    shown = await two.second.http.get(f"/v1/responses/{first}")
    assert (shown.status_code, shown.json()["id"]) == (200, first)
    second = (await create(two.second, "B", first)).json()
    assert second["previous_response_id"] == first
    third = await create(two.first, "C", second["id"])  # a chain over both
    assert third.status_code == 200, third.text
    deleted = await two.second.http.delete(f"/v1/responses/{first}")
    assert deleted.json()["deleted"] is True
    for stack in (two.first, two.second):
        assert (await stack.http.get(f"/v1/responses/{first}")).status_code == 404
        lost = await create(stack, "D", second["id"])
        assert (lost.status_code, lost.json()["error"]["param"]) == (404, "previous_response_id")


async def test_a_frontend_that_left_takes_its_responses_along(two: Two) -> None:
    created = (await create(two.second, "A")).json()["id"]
    assert (await two.first.http.get(f"/v1/responses/{created}")).status_code == 200
    await two.second.server.stop()
    answer = await two.first.http.get(f"/v1/responses/{created}")
    assert answer.status_code == 404 and "is stored at this frontend" in answer.text


async def test_one_that_does_not_answer_is_an_error_to_try_again(two: Two) -> None:
    created = (await create(two.second, "A")).json()["id"]
    await two.second.server._node.server.stop()
    answer = await two.first.http.get(f"/v1/responses/{created}")
    assert answer.status_code == 503 and "does not answer" in answer.text


async def test_without_sharing_each_has_its_own() -> None:
    alone = config(share_responses=False)
    async with Stack(alone) as first:
        other = Stack(alone, num_workers=0, store=first.store, listeners=first.listeners)
        async with other as second:
            await eventually(lambda: second.num_known == 1)
            created = (await create(first, "A")).json()["id"]
            assert (await second.http.get(f"/v1/responses/{created}")).status_code == 404
            assert not second.server._node.server.address, "it does not listen"


async def test_a_response_is_its_keys_alone_at_every_frontend() -> None:
    digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    keys = config(api_keys=";".join(f"{name} {digest}" for name, digest in digests.items()))
    async with Stack(keys) as first:
        other = Stack(keys, num_workers=0, store=first.store, listeners=first.listeners)
        async with other as second:
            await eventually(lambda: second.num_known == 1)
            first.http.headers["x-api-key"] = KEYS["alice"]
            created = (await create(first, "A")).json()["id"]
            for name, status in (("bobby", 404), ("alice", 200)):
                headers = {"x-api-key": KEYS[name]}
                answer = await second.http.get(f"/v1/responses/{created}", headers=headers)
                assert answer.status_code == status, name
