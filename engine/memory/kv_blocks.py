"""The sizes of KV blocks and of pools of them; without PyTorch, which emulated workers lack."""

import logging
import math
import mmap
from typing import Any, Literal

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.config import DeviceKind, EngineConfig
from tandem.engine.schedule.windows import num_blocks_needed, num_tokens_within
from tandem.runtime.errors import CapacityError, ConfigError
from tandem.runtime.wire.dtypes import ELEMENT_BYTES

logger = logging.getLogger(__name__)

Memory = Literal["DRAM", "VRAM"]

MIB = 2**20
# A tile of attention lies in one block of 64, so that the copy engine loads it in one piece.
TOKENS_PER_BLOCK: dict[DeviceKind, int] = {"cpu": 16, "gpu": 64}
# For transfers to time themselves on: enough that the wire and not the posting is measured.
SPARE_BYTES = {"DRAM": 4 * MIB, "VRAM": 256 * MIB}
# As many descriptors as a handoff of 4k tokens has; more would not change a measurement.
MAX_SPARE_BLOCKS = 256
# A pool of a small model would fill a GPU with blocks that no request can come to use.
POOL_SEQUENCE_LENGTHS = 4  # longest sequences per batch row
MAX_CACHE_ROWS = 2**31 - 1  # records of one token and head, which kernels count in 32 bits
# A self-test needs a block to write and one that stays as it was.
MIN_SPARE_BLOCKS = 2


class KvBlocks:
    """The blocks of a pool: `num_blocks` for sequences, and behind them spare ones.

    Transfers calibrate and test themselves on the `num_spare_blocks`. Who derives from it has the
    memory: `tensor` of `shape`, at `base_address`.
    """

    tensor: Any
    base_address: int
    device_id = 0

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, memory: Memory
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes(config, block_size)
        self.memory: Memory = memory
        self.num_spare_blocks = num_spare_blocks(self.block_bytes, memory, num_blocks)
        self.windows = config.layer_groups.windows
        # [num_blocks + num_spare_blocks, group_size, 2, num_kv_heads, block_size, head_dim]
        self.shape = (num_blocks + self.num_spare_blocks, *block_shape(config, block_size))
        self.num_bytes = self.shape[0] * self.block_bytes


def block_shape(config: ModelConfig, block_size: int) -> tuple[int, int, int, int, int]:
    """Return the shape of one block: layers of a group, 2, KV heads, tokens, head_dim."""
    return config.layer_groups.size, 2, config.num_kv_heads, block_size, config.head_dim


def block_bytes(config: ModelConfig, block_size: int) -> int:
    """Return the bytes of one block across the layers of its group, in config.dtype."""
    return math.prod(block_shape(config, block_size)) * ELEMENT_BYTES[config.dtype]


def bytes_per_token(config: ModelConfig, num_tokens: int) -> int:
    """Return the bytes of K/V for each token of a sequence of `num_tokens`, rounded up."""
    num_slots = num_blocks_needed(config.layer_groups.windows, num_tokens, 1)
    return math.ceil(num_slots * block_bytes(config, 1) / num_tokens)


def num_spare_blocks(block_bytes: int, memory: Memory, num_blocks: int) -> int:
    """Return the spare blocks of a pool of `num_blocks`, at most a quarter of them.

    The limit is for small pools, which are small because memory is.
    """
    wanted = math.ceil(SPARE_BYTES[memory] / block_bytes)
    return max(MIN_SPARE_BLOCKS, min(wanted, MAX_SPARE_BLOCKS, num_blocks // 4))


def choose_block_size(config: EngineConfig, kind: DeviceKind) -> int:
    """Return the tokens of a block: the configured number, or the default for the device."""
    return config.block_size or TOKENS_PER_BLOCK[kind]


def num_blocks_within(
    budget_bytes: int, model: ModelConfig, block_size: int, memory: Memory
) -> int:
    """Return the blocks for sequences that `budget_bytes` hold beside the spare ones."""
    block = block_bytes(model, block_size)
    num_all = budget_bytes // block
    return max(0, num_all - num_spare_blocks(block, memory, num_all))


def most_useful_blocks(
    config: EngineConfig, model: ModelConfig, block_size: int, longest: int
) -> int:
    """Return the blocks beyond which a pool that is sized by free memory does not grow."""
    of_one = num_blocks_needed(model.layer_groups.windows, longest, block_size)
    rows_per_block = math.prod(block_shape(model, block_size)[:-1])
    num_addressable = MAX_CACHE_ROWS // rows_per_block - MAX_SPARE_BLOCKS
    return min(POOL_SEQUENCE_LENGTHS * config.max_num_seqs * of_one, num_addressable)


def choose_max_model_len(
    config: EngineConfig, model: ModelConfig, num_blocks: int, block_size: int
) -> int:
    """Return the tokens that one sequence may have.

    Raises ConfigError when more are configured than the model has positions, and CapacityError when
    the pool cannot hold one sequence of the configured length, or a single block.
    """
    windows, asked = model.layer_groups.windows, config.max_model_len
    fitting = num_tokens_within(windows, num_blocks, model.max_position_embeddings, block_size)
    if asked is not None and asked > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {asked} is above the model's {model.max_position_embeddings} positions",
            param="max_model_len",
        )
    if fitting < 1 or (asked is not None and fitting < asked):
        needed = asked or block_size
        size = block_bytes(model, block_size)
        num_needed = num_blocks_needed(windows, needed, block_size)
        raise CapacityError(
            f"the KV pool holds {num_blocks} blocks of {block_size} tokens "
            f"({num_blocks * size / MIB:.1f} MiB); one sequence of {needed} tokens needs "
            f"{num_needed} blocks ({num_needed * size / MIB:.1f} MiB)"
        )
    max_len = asked or min(model.max_position_embeddings, fitting)
    if max_len < model.max_position_embeddings and asked is None:
        logger.warning(
            "max_model_len is %d, the tokens that the KV pool holds; the model has %d positions",
            max_len,
            model.max_position_embeddings,
        )
    return max_len


def host_pages(num_bytes: int) -> mmap.mmap:
    """Allocate anonymous, page-aligned, zeroed pages, all present.

    They are present because a write into pages that are not must first map them: handing over 4k
    tokens took 7 to 8.6 ms that way, and 4.7 to 4.9 ms without.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    return mmap.mmap(-1, num_bytes, flags=flags)
