"""What a worker of the kit answers to a process of the cluster that sends it nonsense."""

from itertools import chain

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import InvalidRequestError, NotFoundError, TandemError
from tandem.sdk import DistributedRuntime
from tests.malformed import garbage, wrong_messages
from tests.sdk.engine.engine_stack import ToyEngine, config_of, serving


async def test_every_endpoint_of_a_kit_worker_refuses_what_is_no_request(
    quick: RuntimeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ToyEngine()
    async with (
        serving(engine, config_of(), quick) as worker,
        DistributedRuntime(worker.runtime.config) as caller,
    ):
        server = worker.runtime.server

        async def answered(endpoint: str, payload: bytes) -> TandemError | None:
            try:
                async with RequestContext(timeout_s=60) as context:
                    await caller.client.call(server.address, endpoint, payload, context)
            except TandemError as error:
                return error
            return None

        endpoints = [name for name in server._handlers if await answered(name, b"\xc1")]
        assert str(worker.address) in endpoints
        wrong = [each for each in chain(*wrong_messages()) if b"Call" not in each[:12]]
        for endpoint in endpoints:
            for payload in (*garbage(), *wrong):
                error = await answered(endpoint, payload)
                if error is not None:
                    assert isinstance(error, InvalidRequestError | NotFoundError), payload[:200]
                    assert error.message.isprintable() and len(error.message) < 500
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
