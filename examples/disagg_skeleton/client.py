"""A client of disagg_skeleton.py; it finds the cluster on this machine by itself."""

import asyncio
import sys

from tandem.sdk import DistributedRuntime, worker


@worker
async def ask(runtime: DistributedRuntime, text: str) -> None:
    client = await runtime.endpoint("disagg-skeleton.DecodeWorker.generate").client()
    await client.wait_for_instances(timeout_s=10)
    async for item in await client.generate({"text": text}, annotated=False):
        print(item["word"], f"({item['prefill']})", flush=True)


if __name__ == "__main__":
    asyncio.run(ask(" ".join(sys.argv[1:]) or "the quick brown fox jumps"))
