"""A worker whose ranks keep a KV pool each, as on GPUs, beside one of a single process."""

from collections.abc import Awaitable
from pathlib import Path
from typing import Any, cast

import pytest

from tandem.engine.ranks.marks import MarkedEvent
from tandem.runtime.config import RuntimeConfig
from tandem.transfer.agents.group import WriteOrder
from tandem.transfer.agents.link import Link
from tandem.transfer.config import TransferConfig
from tests.e2e.cluster import write_sensitive_model
from tests.handoff_peer import FREE_WRITES, fresh_prompt
from tests.worker.pair import Pair


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("tandem.engine.execution.followers.are_apart", lambda config: True)


@pytest.mark.slow
async def test_layers_leave_each_rank_while_the_step_is_computed(
    runtime_config: RuntimeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.worker.pair.TRANSFER", TransferConfig())
    model = write_sensitive_model(tmp_path)
    async with Pair(runtime_config, model, engine_of_one={"tp": 2}) as pair:
        for one, other in ((pair.one, pair.two), (pair.two, pair.one)):
            group = one.worker.group
            group.links[other.node.instance_id].rates = FREE_WRITES
            write, orders = group.write, list[WriteOrder]()

            def noted(
                link: Link, order: WriteOrder, write: Any = write, orders: Any = orders
            ) -> Awaitable[bytes]:
                orders.append(order)
                return cast("Awaitable[bytes]", write(link, order))

            monkeypatch.setattr(group, "write", noted)
            for index in range(3):
                report = await pair.answered(other, fresh_prompt(21, seed=index), place="remote")
                assert report.place == "remote"
            pairs = {(order.ranks.prefill_rank, order.ranks.decode_rank) for order in orders}
            assert len(pairs) == 2
            for ranks in pairs:
                its_own = [
                    order
                    for order in orders
                    if (order.ranks.prefill_rank, order.ranks.decode_rank) == ranks
                ]
                assert {order.layers for order in its_own} >= {range(1), range(3, 4)}
                is_marked = any(isinstance(order.after, MarkedEvent) for order in its_own)
                assert is_marked == (one is pair.one)
        await pair.balanced()


@pytest.mark.slow
async def test_ranks_with_a_head_in_common_hand_prompts_over_and_take_them_over(
    runtime_config: RuntimeConfig, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks of `one` have the only KV head."""
    monkeypatch.setattr("tests.worker.pair.TRANSFER", TransferConfig())
    async with Pair(runtime_config, tiny_model, engine_of_one={"tp": 2}) as pair:
        assert pair.one.worker.deployment == pair.two.worker.deployment
        assert pair.one.worker.group.layout.num_kv_heads == 1
        for index in range(4):
            for other in (pair.one, pair.two):
                prompt = fresh_prompt(21 + index, seed=index)
                assert (await pair.answered(other, prompt, place="remote")).place == "remote"
        await pair.balanced()
