"""A client of custom_router.py: it sends prompts twice and prints the worker of each."""

import asyncio

from tandem.sdk import DistributedRuntime, worker


@worker
async def ask(runtime: DistributedRuntime) -> None:
    client = await runtime.endpoint("routed.Frontend.generate").client()
    await client.wait_for_instances(timeout_s=10)
    for turn in ("first", "again"):
        for topic in range(4):
            prompt = {"token_ids": list(range(1000 * topic, 1000 * topic + 160))}
            async for done in await client.generate(prompt, annotated=False):
                cached = f"{done['num_cached_blocks']} of {done['num_blocks']} blocks cached"
                print(f"prompt {topic} {turn}: worker {done['worker_id'][:8]}, {cached}")


if __name__ == "__main__":
    asyncio.run(ask())
