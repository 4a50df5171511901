"""A client of hello_world.py; it finds the cluster on this machine by itself."""

import asyncio
import sys

from tandem.sdk import DistributedRuntime, worker


@worker
async def say(runtime: DistributedRuntime, text: str) -> None:
    client = await runtime.endpoint("hello.Frontend.generate").client()
    await client.wait_for_instances(timeout_s=10)
    async for word in await client.generate({"text": text}, annotated=False):
        print(word, end="", flush=True)
    print()


if __name__ == "__main__":
    asyncio.run(say(" ".join(sys.argv[1:]) or "hello world"))
