"""Attacks of anyone who reaches etcd: keys and values that no process of the cluster put."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aetcd import rpc

from tandem.runtime.store.etcd_client import EtcdClient
from tests.soak.attacks.target import HOLD_S, Attack, Target
from tests.soak.attacks.traps import GREETINGS, trap

Value = tuple[bytes, bytes]
VALUES = (
    b"", b"{", b"\xff", b"null", b"{}", b"[]", b'"x"', b"1e999", b"[" * 100_000,
    b'{"a":' * 100_000, b"x" * 1_000_000,
)  # fmt: skip
FOLDERS = (
    b"instances/decode/generate", b"instances/prefill/prefill", b"instances/frontend/http",
    b"models", b"transfer", b"config", b"unknown",
)  # fmt: skip


class _Store:
    """etcd's keys and values, in bytes."""

    def __init__(self, target: Target) -> None:
        self.client = EtcdClient(target.etcd_url, "/unused")
        self.root = f"/tandem/{target.namespace}/".encode()

    async def put(self, key: bytes, value: bytes) -> None:
        await self.client._kv.Put(rpc.PutRequest(key=key, value=value))

    async def under(self, folder: bytes) -> list[Value]:
        """Return the keys of a folder, and their values."""
        prefix = self.root + folder
        request = rpc.RangeRequest(key=prefix + b"/", range_end=prefix + b"0")
        return [(each.key, each.value) for each in (await self.client._kv.Range(request)).kvs]

    async def delete(self, key: bytes, range_end: bytes = b"") -> None:
        """Delete a key, or all from it to the end of a range."""
        await self.client._kv.DeleteRange(rpc.DeleteRangeRequest(key=key, range_end=range_end))


@asynccontextmanager
async def _store(target: Target) -> AsyncIterator[_Store]:
    store = _Store(target)
    await store.client.open()
    try:
        yield store
    finally:
        await store.client.close()


@asynccontextmanager
async def _planted(target: Target, *values: Value) -> AsyncIterator[None]:
    """Put keys below the namespace, and take them away again."""
    async with _store(target) as store:
        for key, value in values:
            await store.put(store.root + key, value)
        try:
            yield
        finally:
            for key, _ in values:
                await store.delete(store.root + key)


async def garbage_values(target: Target) -> list[int]:
    values = [
        (b"%b/stranger%d" % (folder, number), value)
        for folder in FOLDERS
        for number, value in enumerate(VALUES)
        if len(value) < 1_000_000 or folder == b"unknown"
    ]
    async with _planted(target, *values):
        await asyncio.sleep(HOLD_S)
    return []


async def keys_that_are_not_utf8(target: Target) -> list[int]:
    names = (b"\xff\xfe", b"\0", b"a\x1b[31m\nforged", b"../..", b"%2f", b"x" * 10_000)
    values = [(folder + b"/" + name, b"{}") for folder in FOLDERS for name in names]
    async with _planted(target, *values):
        await asyncio.sleep(HOLD_S)
    return []


async def odd_live_values(target: Target) -> list[int]:
    names = (b"disagg.claim_timeout_ms", b"disagg.max_local_prefill_length", b"disagg.policy")
    numbers = (b"-1", b"1e12", b"1000000000000", b"NaN", b'"x"', b"null", b"[" * 10_000, b"\xff")
    for number in numbers:
        async with _planted(target, *((b"config/" + name, number) for name in names)):
            await asyncio.sleep(HOLD_S / len(numbers))
    return []


@asynccontextmanager
async def planted_instances_at(target: Target, address: str) -> AsyncIterator[None]:
    """Keep copies of the honest workers' records with a stranger's address, first of all."""
    async with _store(target) as store:
        honest = [each for folder in FOLDERS[:-2] for each in await store.under(folder)]
    copies = []
    for key, value in honest:
        own_id = key.rpartition(b"/")[2]
        first_id = b"0" * len(own_id)
        planted = value.replace(own_id, first_id)
        for worker in target.workers:
            planted = planted.replace(worker.encode(), address.encode())
        copies.append((key.replace(own_id, first_id).removeprefix(store.root), planted))
    async with _planted(target, *copies):
        yield


async def planted_instances(target: Target) -> list[int]:
    for greeting in GREETINGS:
        async with trap(greeting) as address, planted_instances_at(target, address):
            await asyncio.sleep(HOLD_S)
    return []


async def planted_cards(target: Target) -> list[int]:
    """Cards of the honest model with other sizes."""
    async with _store(target) as store:
        honest = await store.under(b"models")
    copies = []
    for field in (b"context_length", b"block_size", b"vocab_size"):
        for number in (b"0", b"1", b"-5", b"1000000000000"):
            for key, value in honest:
                changed = re.sub(rb'"%b": ?\d+' % field, b'"%b":%b' % (field, number), value)
                name = b"/0%b%b" % (field, number)
                copies.append((key.rpartition(b"/")[0].removeprefix(store.root) + name, changed))
    async with _planted(target, *copies):
        await asyncio.sleep(HOLD_S)
    return []


async def deleted_keys(target: Target) -> list[int]:
    async with _store(target) as store:
        await store.delete(b"\0", b"\0")
    await asyncio.sleep(HOLD_S)
    return []


async def records_that_come_and_go(target: Target) -> list[int]:
    """Deletes and puts back the records of workers, as fast as etcd does it."""
    async with _store(target) as store:
        for _ in range(20):
            for key, value in await store.under(b"instances"):
                await store.put(key, value + b" ")
                await store.put(key, value)
    return []


ETCD_ATTACKS: tuple[Attack, ...] = (
    garbage_values, keys_that_are_not_utf8, odd_live_values, planted_instances, planted_cards,
    deleted_keys, records_that_come_and_go,
)  # fmt: skip
