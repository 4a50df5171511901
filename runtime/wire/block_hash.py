"""KV blocks of a prompt: their number, and their names, a chain of keyed hashes. Pure."""

import hashlib
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

DIGEST_BYTES = 16


def num_blocks_of(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens, the last one in part."""
    return -(-num_tokens // block_size)


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    *,
    salt: str = "",
    adapter: str = "",
    parent: bytes | None = None,
) -> list[bytes]:
    """One digest per full block of `token_ids`; the partial tail has none.

    Equal digests mean equal tokens from the prompt's start on, under the same salt and adapter.
    `parent` is the digest of the block before the first token given; None at the prompt's start.
    """
    key = _key(salt, adapter)
    packed = array("I", token_ids[: len(token_ids) // block_size * block_size])
    if sys.byteorder == "big":
        packed.byteswap()
    data = packed.tobytes()
    digest = parent if parent is not None else bytes(DIGEST_BYTES)
    digests = []
    for start in range(0, len(data), 4 * block_size):
        block = data[start : start + 4 * block_size]
        digest = hashlib.blake2b(digest + block, digest_size=DIGEST_BYTES, key=key).digest()
        digests.append(digest)
    return digests


@lru_cache(maxsize=64)
def _key(salt: str, adapter: str) -> bytes:
    """A key that no other (salt, adapter) has: the lengths keep the parts apart."""
    parts = [part.encode() for part in (salt, adapter)]
    material = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(material, digest_size=32).digest()
