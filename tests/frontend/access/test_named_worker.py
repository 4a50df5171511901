"""The header by which the endpoint picker names a worker: obeyed from it, ignored from others."""

import pytest
from pydantic import SecretStr

from tandem.frontend.access.named_worker import HEADER, NamedWorkers
from tandem.runtime.config import RuntimeConfig
from tests.frontend.frontend_stack import Stack
from tests.services import eventually

OURS, OTHERS = NamedWorkers(SecretStr("a token")), NamedWorkers(SecretStr("another"))


def named(header: str, reader: NamedWorkers = OURS) -> str:
    return reader.named_in({HEADER.encode(): header.encode("latin-1")})


def test_only_those_with_the_cluster_token_can_name_a_worker() -> None:
    assert named(OURS.header("w1")) == "w1"
    for header in ("w1", "w1 ", OTHERS.header("w1"), "w2" + OURS.header("w1")[2:], "é" * 300, "é"):
        assert named(header) == ""
    assert OURS.named_in({}) == ""


def test_without_a_token_there_is_no_mac() -> None:
    open_to_all = NamedWorkers(None)
    assert named(open_to_all.header("w1"), open_to_all) == "w1"
    assert named(OURS.header("w1"), open_to_all) == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_goes_to_the_worker_that_the_picker_names(stream: bool) -> None:
    runtime = RuntimeConfig(cluster_token=SecretStr("a token"))
    async with Stack(num_workers=0, runtime=runtime) as stack:
        workers = [await stack.add_worker(config=runtime) for _ in range(3)]
        await eventually(lambda: stack.num_known == len(workers))
        for worker in workers:
            for _ in range(2):
                answer = await stack.chat(
                    headers={HEADER: OURS.header(worker.instance_id)}, stream=stream
                )
                assert answer.headers["x-tandem-decode-instance"] == worker.instance_id
                assert "named by the endpoint picker" in answer.headers["x-tandem-decode-reason"]
        for header in (OTHERS.header(workers[0].instance_id), OURS.header("gone")):
            answer = await stack.chat(headers={HEADER: header}, stream=stream)
            assert "named" not in answer.headers["x-tandem-decode-reason"]
            assert answer.status_code == 200


async def test_a_named_worker_that_fails_is_named_once(pair: Stack) -> None:
    failing, other = pair.workers
    failing.cut()
    failing.vanish()
    answer = await pair.complete(headers={HEADER: failing.instance_id})
    assert answer.status_code == 200
    assert answer.headers["x-tandem-decode-instance"] == other.instance_id


async def test_the_first_choice_alone_is_named(pair: Stack) -> None:
    for worker in pair.workers:
        await pair.complete(headers={HEADER: worker.instance_id}, n=2)
    assert [len(worker.requests) for worker in pair.workers] == [2, 2]
