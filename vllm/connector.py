"""Tandem's verified handoff as a connector of vLLM: `kv_connector_module_path` names this module.

vLLM makes one object in the process of its scheduler and one in that of each rank. The interface is
experimental, so other versions of vLLM are refused.
"""

from collections import Counter
from typing import Any

import msgspec

from tandem.vllm.kv_layout import check_supported, layout_of, pool_of
from tandem.vllm.scheduler_side import SchedulerSide
from tandem.vllm.settings import connector_settings
from tandem.vllm.step_messages import Orders
from tandem.vllm.versions import check_version
from tandem.vllm.worker_side import WorkerSide

check_version()

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats  # noqa: E402


class Placements(KVConnectorStats):  # type: ignore[misc]
    """The places of prompts, by the names of their reports: a part of a step's statistics."""

    def aggregate(self, other: KVConnectorStats) -> "Placements":
        return Placements(self.data | other.data)

    def reduce(self) -> dict[str, int | float]:
        """Return the number of prompts by place, which vLLM logs."""
        return dict(Counter(report["place"] for report in self.data.values()))

    def is_empty(self) -> bool:
        return not self.data


class TandemConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """The calls of vLLM, for whichever of the two sides this object is.

    It is no `SupportsHMA`: layers with windows then keep their whole KV, as those without do.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_supported(vllm_config, kv_cache_config)
        self._is_rank = role is KVConnectorRole.WORKER
        self._at_scheduler: SchedulerSide  # in the scheduler's process
        self._at_rank: WorkerSide  # in a rank's
        if self._is_rank:
            self._at_rank = WorkerSide(connector_settings(vllm_config))
        else:
            transfer = vllm_config.kv_transfer_config
            self._at_scheduler = SchedulerSide(
                layout_of(kv_cache_config).block_size,
                num_ranks=vllm_config.parallel_config.world_size,
                offers=transfer.is_kv_consumer,
                takes=transfer.is_kv_producer,
            )

    # ---- of the scheduler ---------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._at_scheduler.pool = gpu_block_pool

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._at_scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        (block_ids,) = blocks.get_block_ids()
        self._at_scheduler.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        state = scheduler_output.kv_connector_block_state
        return self._at_scheduler.orders(
            scheduler_output.num_scheduled_tokens,
            lambda request_id: state.resolve_block_ids(request_id)[0],
        )

    def update_connector_output(self, connector_output: Any) -> None:
        self._at_scheduler.take_news(connector_output.kv_connector_worker_meta)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._at_scheduler.finished(request)
        return False, None  # blocks that are still read are pinned

    def has_pending_push_work(self) -> bool:
        return self._at_scheduler.is_busy

    def get_kv_connector_stats(self) -> Placements | None:
        """Return the placements since the last call; the ranks have none."""
        if self._is_rank:
            return None
        return Placements(msgspec.to_builtins(self._at_scheduler.take_reports()))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Placements:
        return Placements(data or {})

    # ---- of a rank ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._at_rank.join(pool_of(self._kv_cache_config, kv_caches))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._at_rank.begin_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests wait for their loads outside of the steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Do nothing: blocks are written whole, after the step."""

    def wait_for_save(self) -> None:
        self._at_rank.begin_writes(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        named, failed = self._at_rank.take_ends()
        return KVConnectorTransferResults(set(), named, failed)

    def build_connector_worker_meta(self) -> Any:
        return self._at_rank.news()

    # ---- of both ------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._is_rank:
            self._at_rank.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        return "LBHNC"

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a prompt whose KV is not delivered is computed by the decode worker."""
        return False
