"""A worker whose ranks keep a KV pool each, as on GPUs, beside one of a single process."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError, InvalidRequestError
from tests.decode.prefill_peer import fresh_prompt
from tests.services import eventually
from tests.worker.pair import Both, Pair


class Uneven(Pair):
    """Workers of which neither is to connect to the other."""

    async def __aenter__(self) -> "Uneven":
        for part in (self.peer, self.one, self.two):
            await self._stack.enter_async_context(part)
        ids = {self.one.node.instance_id, self.two.node.instance_id}
        await eventually(
            lambda: all(
                ids <= each.decode._prefill_instances.items.keys() for each in (self.one, self.two)
            )
        )
        return self


@pytest_asyncio.fixture
async def pair(
    runtime_config: RuntimeConfig, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Uneven]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("tandem.engine.execution.followers.are_apart", lambda config: True)
    async with Uneven(runtime_config, tiny_model, engine_of_one={"tp": 2}) as pair:
        yield pair


@pytest.mark.slow
async def test_it_computes_its_prompts_itself_and_says_why(pair: Uneven) -> None:
    prompt = fresh_prompt(21, seed=1)
    answer = await pair.ask(pair.one, prompt, place="remote")
    assert await answer.whole() == pair.undisturbed(prompt)
    assert answer.report is not None and answer.report.place == "local"
    assert answer.report.reason.startswith("each GPU of this model keeps the KV of its own heads")
    # Nor does it compute those of the other, which finds no worker that fits it.
    assert pair.one.worker.deployment != pair.two.worker.deployment
    other = fresh_prompt(21, seed=2)
    answer = await pair.ask(pair.two, other, place="remote")
    assert await answer.whole() == pair.undisturbed(other)
    assert answer.report is not None and answer.report.reason == "no prefill worker"
    status = await pair.one.worker._worker_status()
    assert f"on 2 GPUs of worker {pair.one.node.instance_id} alone" in str(
        status.details["kv_form"]
    )
    with pytest.raises(InvalidRequestError, match="hands none over"):
        await pair.change(pair.one, "prefill")


def test_a_prefill_worker_of_several_gpus_is_refused(
    runtime_config: RuntimeConfig, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="tp 2: a worker whose model is shared among GPUs"):
        Both(runtime_config, tiny_model, role="prefill", engine={"tp": 2, "device": "cuda:0"})
