"""Prints how long the endpoint picker takes: python -m tests.launch.epp.measure

One request at a time, its prompt about 480 tokens of the tests' small tokenizer, over gRPC on
loopback, beside a frontend and workers in the same process. The CPU time is that of the process:
it has the Gateway's part too, and nothing of what else runs on the machine.
"""

import asyncio
import json
import time
from unittest import mock

import numpy as np
import uvloop

from tests.frontend import frontend_stack
from tests.frontend.frontend_stack import MODEL, Stack, token_ids
from tests.launch.epp.gateway import Gateway, channel_to, mutations_of, picker_of

NUM_WORKERS = 16
NUM_REQUESTS = 2000
NUM_TOKENS = 480


async def measure() -> list[tuple[float, float]]:
    """Return milliseconds from a request's last byte to the answer: passed, and of CPU time."""
    words = "hello there world "
    prompt = words * (NUM_TOKENS // len(token_ids(words)))
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 8}).encode()
    took_ms: list[tuple[float, float]] = []
    async with (
        Stack(num_workers=NUM_WORKERS) as stack,
        picker_of(stack) as server,
        channel_to(server) as channel,
    ):
        for _ in range(NUM_REQUESTS + 100):
            gateway = Gateway(channel)
            await gateway.head()
            started_s, cpu_s = time.perf_counter(), time.process_time()
            await gateway.body(body)
            answer = await gateway.read()
            passed_s, used_s = time.perf_counter() - started_s, time.process_time() - cpu_s
            took_ms.append((passed_s * 1e3, used_s * 1e3))
            assert mutations_of(answer)["x-tandem-worker"]
            await gateway.end()
    return took_ms[100:]


if __name__ == "__main__":
    uvloop.install()
    with mock.patch.object(frontend_stack, "CONTEXT_LENGTH", 2 * NUM_TOKENS):
        figures = asyncio.run(measure())
    for share in (50, 90, 99):
        passed_ms, cpu_ms = np.percentile(figures, share, axis=0)
        print(f"p{share}: {passed_ms:.2f} ms, of CPU time {cpu_ms:.2f} ms")
