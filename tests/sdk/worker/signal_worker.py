"""A worker as a process of its own, for tests that send it signals."""

import asyncio

import uvloop

from tandem.sdk import DistributedRuntime, dynamo_worker
from tests.sdk.kit_pair import Seen


@dynamo_worker(static=False)
async def serve(runtime: DistributedRuntime) -> None:
    print("here", flush=True)
    await runtime.endpoint("signal.worker.count").serve_endpoint(Seen().generate)
    print("returned", flush=True)


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(serve())
