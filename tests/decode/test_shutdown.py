"""The end of a decode worker that has only just been heard of."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.process.lifecycle import Lifecycle, State
from tandem.runtime.store.discovery import watch_instances
from tests.decode.prefill_peer import PROMPT, Stage


async def test_a_signal_while_the_worker_is_being_registered_lets_its_answers_finish(
    runtime_config: RuntimeConfig, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, lifecycle = Stage(runtime_config, tiny_model), Lifecycle()
    worker, node = stage.worker, stage.worker.node
    put = node.discovery.put
    is_known = asyncio.Event()

    async def put_without_answer(key: str, value: bytes) -> None:
        await put(key, value)
        if key == worker.endpoint.instance_key(node.instance_id):
            is_known.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(node.discovery, "put", put_without_answer)
    async with stage.peer:
        discovery = stage.peer.node.discovery
        view = watch_instances(discovery, runtime_config.namespace, "decode")
        running = asyncio.create_task(
            lifecycle.run(
                startup=partial(stage.process.startup, worker),
                drain=stage.process.drain,
                stop=stage.process.stop,
            )
        )
        await is_known.wait()
        await view.wait_for(lambda items: node.instance_id in items, 60)
        await stage.register(os.getpid())
        await stage.connect()
        answer, work = await stage.handoff(PROMPT)
        assert lifecycle.state is State.STARTING
        os.kill(os.getpid(), signal.SIGTERM)
        await view.wait_for(lambda items: not items, 60)
        assert lifecycle.state is State.DRAINING
        await stage.deliver(work)
        assert await answer.whole() == stage.undisturbed(PROMPT)
        await running
        await asyncio.gather(*stage.readers)
