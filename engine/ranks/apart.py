"""Ranks with a device each: exchanges over torch.distributed, and a KV pool of each one's heads."""

import logging
from collections.abc import Callable
from zlib import crc32

import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.shard import Shard
from tandem.kernels.ranks.gathered import GatheredExchange
from tandem.runtime.errors import ModelError

logger = logging.getLogger(__name__)

# In which the ranks, whose weights are loaded, meet; and the longest that one waits for another,
# which may be building kernels. An end is noticed at once.
PATIENCE_S = 600.0
UNEVEN = 1.1  # times as many KV blocks as another rank's


class ApartRank:
    """A Rank of GPUs, which meet in `folder`; `wait` returns once all ranks have their weights."""

    allocate = None
    draws_apart = True

    def __init__(
        self, shard: Shard, device: torch.device, folder: str, wait: Callable[[], None]
    ) -> None:
        self.shard = shard
        self._device, self._folder, self._wait = device, folder, wait
        self._exchange: GatheredExchange | None = None

    @property
    def exchange(self) -> GatheredExchange:
        assert self._exchange is not None, "before `ready`"
        return self._exchange

    @property
    def pool_config(self) -> ModelConfig:
        return self.shard.config

    def ready(self) -> None:
        """Return once all ranks have their weights and reach one another. Raises ModelError."""
        self._wait()
        shard = self.shard
        where = self._folder, shard.index, shard.size, self._device
        try:
            self._exchange = GatheredExchange(*where, PATIENCE_S)
            self._exchange.check()
            self._check_kind(self._exchange)
        except RuntimeError as error:
            raise ModelError(
                f"the {shard.size} ranks of the model do not reach one another: {error}; "
                "`nvidia-smi topo -m` shows the links of GPUs, and NCCL_DEBUG=INFO what fails. In "
                "a container, --ipc=host gives the shared memory that they need. Where GPUs can't "
                "reach one another, start one worker for each, with a model that fits it"
            ) from error
        logger.info("%d ranks reach one another by %s", shard.size, self._exchange.library)

    def _check_kind(self, exchange: GatheredExchange) -> None:
        """Raise ModelError for GPUs of several kinds: numbers that all compute would differ."""
        if self._device.type != "cuda":
            return
        name = torch.cuda.get_device_name(self._device)
        number = crc32(name.encode())
        if exchange.least(number) != -exchange.least(-number):
            raise ModelError(f"ranks need GPUs of one kind, and {self._device} is {name}")

    def own_heads(self, pool: torch.Tensor) -> torch.Tensor:
        """Return `pool`: it has no other heads."""
        return pool

    def meet(self) -> None:
        """Do nothing: what reads a rank's pool waits for the rank's own marks."""

    def agree(self, num_blocks: int) -> int:
        """Return the least number of all ranks; say so where others have far more memory."""
        least, most = self.exchange.least(num_blocks), -self.exchange.least(-num_blocks)
        if most > UNEVEN * least:
            logger.warning(
                "the GPUs of this model have memory for %d to %d KV blocks, and each gets %d: "
                "nvidia-smi shows what else runs on them",
                *(least, most, least),
            )
        return least

    def share(self, drawn: torch.Tensor) -> None:
        self.exchange.share(drawn)

    def end_waiting(self) -> None:
        if self._exchange is not None:
            self._exchange.end()

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
