"""`tandem serve` is ready when its decode workers know its prefill workers."""

import asyncio
from dataclasses import dataclass, field

import pytest

from tandem.launch.serve.known import until_known
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.plane.server import RequestServer, Responder
from tandem.runtime.wire.cluster_messages import Instance, LoadReport, WorkerStatus
from tandem.runtime.wire.messages import encode

CONFIG = RuntimeConfig()
LOAD = LoadReport("d0", "epoch", "decode", 0, 0, 0, 9, 9, 0)


@dataclass
class Decode:
    """The `status` endpoint of a decode worker."""

    details: dict[str, str | int | float | bool] = field(default_factory=dict)
    num_asked: int = 0

    async def start(self) -> None:
        self.server = RequestServer(CONFIG, "d0")
        self.server.register("status", self._status)
        await self.server.start()
        self.instance = instance("decode", self.server.address)

    async def _status(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        self.num_asked += 1
        answer.send(encode(WorkerStatus(self.instance, "serving", LOAD, self.details)))

    async def asked(self, num_times: int) -> None:
        while self.num_asked < num_times:
            await asyncio.sleep(0.01)


def instance(component: str, address: str = "127.0.0.1:1") -> Instance:
    return Instance("test", component, "jobs", component, address, "epoch")


async def test_members_that_die_meanwhile_are_not_waited_for() -> None:
    decode = Decode({"num_prefill_instances": 1})
    await decode.start()
    dead = [instance("decode"), instance("prefill")]
    members = [decode.instance, instance("prefill"), *dead]
    known = asyncio.create_task(until_known(CONFIG, lambda: members))
    await decode.asked(2)
    assert not known.done()
    members.remove(dead[0])
    await decode.asked(decode.num_asked + 2)
    assert not known.done(), "it counts a prefill worker that the other knows to be dead"
    members.remove(dead[1])
    await known
    await decode.server.stop()


async def test_decode_workers_are_asked_until_they_know_every_prefill_worker() -> None:
    late, early = Decode({"num_prefill_instances": 0}), Decode({"num_prefill_instances": 2})
    await late.start()
    await early.start()
    members = [instance("prefill"), late.instance, early.instance, instance("prefill")]
    known = asyncio.create_task(until_known(CONFIG, lambda: members))
    for num_known in (0, 1):
        late.details["num_prefill_instances"] = num_known
        await late.asked(late.num_asked + 2)
        assert not known.done()
    late.details["num_prefill_instances"] = 2
    await known
    assert early.num_asked
    await late.server.stop()
    await early.server.stop()


async def test_a_worker_that_does_not_answer_is_asked_again() -> None:
    decode = Decode({"num_prefill_instances": 1})
    await decode.start()
    decode.server.unregister("status")
    known = asyncio.create_task(until_known(CONFIG, lambda: [decode.instance, instance("prefill")]))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await asyncio.shield(known)
    decode.server.register("status", decode._status)
    await known
    await decode.server.stop()


async def test_a_worker_that_no_longer_decodes_is_not_waited_for() -> None:
    decode = Decode()
    await decode.start()
    await until_known(CONFIG, lambda: [decode.instance, instance("prefill")])
    assert decode.num_asked
    await decode.server.stop()
