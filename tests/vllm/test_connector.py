"""The connector's class over a fake of vLLM's base: every call reaches its side."""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.runtime.errors import ConfigError
from tandem.vllm import versions
from tandem.vllm.step_messages import LoadEnd, News, Released
from tests.vllm import fake_vllm
from tests.vllm.fake_scheduler import REMOTE, FakeRequest, Pool, at
from tests.vllm.fake_vllm import KVConnectorRole
from tests.vllm.test_kv_layout import BLOCKS, cache_config, vllm_config


@pytest.fixture(scope="module")
def connector_class() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, fake_vllm.installed():
        patch.setattr(versions, "version", lambda name: "0.32.0")
        yield importlib.import_module("tandem.vllm.connector").TandemConnector


def engine_config(**changed: Any) -> Any:
    config = vllm_config(**changed)
    config.kv_transfer_config.is_kv_producer = False
    return config


def step(connector: Any, request: FakeRequest, **scheduled: int) -> Any:
    """Build a step's orders, and hand the news of a rank without ends back."""
    state = SimpleNamespace(resolve_block_ids=lambda request_id: (request.block_ids,))
    output = SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)
    orders = connector.build_connector_meta(output)
    news = SimpleNamespace(kv_connector_worker_meta=News(REMOTE))
    connector.update_connector_output(news)
    return orders


def test_the_schedulers_object_offers_a_prompt_and_frees_its_quarantine(
    connector_class: Any,
) -> None:
    connector = connector_class(engine_config(), KVConnectorRole.SCHEDULER, cache_config())
    pool, request = Pool(BLOCKS), FakeRequest("r", 10)
    connector.bind_gpu_block_pool(pool)
    assert connector.get_num_new_matched_tokens(request, 0) == (None, False)
    step(connector, request)
    assert connector.get_num_new_matched_tokens(request, 0) == (9, True)
    request.block_ids = pool.allocate(3)
    blocks = SimpleNamespace(get_block_ids=lambda: (request.block_ids,))
    connector.update_state_after_alloc(request, blocks, 9)
    (offer,) = step(connector, request).offers
    assert offer.block_ids == request.block_ids and not connector.has_pending_push_work()
    assert connector.request_finished(request, request.block_ids) == (False, None)
    news = News(REMOTE, {0: [LoadEnd("r", offer.key, quarantined=True)]})
    connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=news))
    pool.free_blocks([pool.blocks[each] for each in request.block_ids])
    assert connector.has_pending_push_work() and len(pool.free) == BLOCKS - 3
    news = News(REMOTE, {0: [Released(offer.key)]})
    connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=news))
    assert not connector.has_pending_push_work() and len(pool.free) == BLOCKS


def test_the_places_of_prompts_are_statistics_of_a_step(connector_class: Any) -> None:
    connector = connector_class(engine_config(), KVConnectorRole.SCHEDULER, cache_config())
    connector.bind_gpu_block_pool(Pool(BLOCKS))
    assert connector.get_kv_connector_stats().is_empty()
    step(connector, FakeRequest("r", 10))
    connector.get_num_new_matched_tokens(FakeRequest("r", 10, at("local")), 0)
    stats = connector.get_kv_connector_stats()
    assert stats.data["mine"]["place"] == "local"
    again = connector_class.build_kv_connector_stats({"other": {"place": "remote"}})
    assert again.aggregate(stats).reduce() == {"local": 1, "remote": 1}
    assert connector.get_kv_connector_stats().is_empty(), "each place is reported once"


def test_an_engine_without_handoffs_gets_no_connector(connector_class: Any) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size"):
        connector_class(
            engine_config(pipeline_parallel_size=2), KVConnectorRole.SCHEDULER, cache_config()
        )


def test_the_connector_wants_layers_one_after_another(connector_class: Any) -> None:
    assert connector_class.get_required_kvcache_layout(None) == "LBHNC"
