"""A member of a cluster and the state that it reports."""

import asyncio

import msgspec

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import TandemError
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.wire.cluster_messages import Instance, WorkerStatus
from tandem.runtime.wire.decoding import decoder

decode_status = decoder(WorkerStatus)

CALL_TIMEOUT_S = 0.5  # a stopped process does not answer, and a person is waiting


class InstanceReport(msgspec.Struct, frozen=True):
    """One process; `worker` is None for a frontend, and for a worker that did not answer."""

    instance: Instance
    state: str
    worker: WorkerStatus | None = None

    @property
    def role(self) -> str:
        """The component that was registered, or `both` for a worker with two of them."""
        has_both = self.worker is not None and self.worker.load.role == "both"
        return "both" if has_both else self.instance.component


async def ask_worker(
    client: RequestClient, instance: Instance, timeout_s: float = CALL_TIMEOUT_S
) -> InstanceReport:
    """Return the status of a worker, or the reason why there is none."""
    try:
        async with asyncio.timeout(timeout_s), RequestContext() as context:
            answer = await client.call(instance.address, "status", b"", context)
        worker = decode_status(answer)
    except TimeoutError:
        return InstanceReport(instance, f"no answer within {timeout_s:g} s")
    except TandemError as error:
        return InstanceReport(instance, f"no answer: {error}")
    return InstanceReport(instance, worker.state, worker)
