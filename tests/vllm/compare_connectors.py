"""Tandem's connector beside vLLM's NixlConnector (pull) and NixlPushConnector, under equal faults.

    .venv-vllm/bin/python -m pip install --no-deps nixl==1.5.1   # its name in vLLM's connectors
    .venv-vllm/bin/python -m tests.vllm.compare_connectors [ROUNDS] [tandem,pull,push]

The proxy of vLLM's two is this program: it asks the prefill engine, then the decode engine, under
one request id, and repeats nothing.
"""

import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tandem.models.random_model import write_random_model
from tandem.runtime.address import new_id
from tandem.vllm.versions import check_version
from tests.services import EtcdServer, NatsServer, free_port
from tests.vllm.vllm_cluster import (
    ARGUMENTS,
    VllmCluster,
    kv_in_use,
    parts_of,
    random_prompt,
    with_plugin,
)

START_S = 1800.0  # a start takes a minute on two idle cores, and took four at a load of 30
END_S = 20.0
LIMIT_S, STOP_S, LEASE_S = 45.0, 8.0, 32.0  # a caller's patience; a stop; vLLM's lease of blocks
LONG = 4000  # tokens
LOG_CHARS = 10_000  # enough for a cause and vLLM's traces about it
WORDS = (*ARGUMENTS, "--max-model-len", "4352", "--max-num-batched-tokens", "512",
         "--served-model-name", "random")  # fmt: skip
FLIP = "FLIP_NEXT"  # names a file: while it exists, the next block that lands loses it and a bit
PLUGIN = "tests.vllm.compare_connectors:flip_landed_bits"
Act = Callable[[], Any]


def flip_landed_bits() -> None:
    """In vLLM's processes: flip an exponent's bit in a block that has landed, when one is due."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    from tandem.transfer.handoff.receiver import HandoffReceiver

    due, theirs = Path(os.environ[FLIP]), base_worker.NixlBaseConnectorWorker
    verify, results = HandoffReceiver._verify, theirs.get_transfer_results

    def flip(records: Any, block: int) -> None:
        if due.exists():
            due.unlink()
            records[block].flatten().view(dtype=records.new_empty(0).char().dtype)[3] ^= 64

    async def flipped(self: Any, work: Any) -> None:
        flip(self._group.pool.tensor, work.blocks[0][1])
        await verify(self, work)

    def results_flipped(self: Any) -> Any:
        landing = dict(self._recving_metadata)
        found = results(self)
        for name in found.finished_recving - found.failed_recving:
            layer = next(iter(self.device_kv_caches.values()))
            flip(layer, landing[name].local_physical_block_ids[0][0])
        return found

    HandoffReceiver._verify = flipped  # type: ignore[method-assign]
    theirs.get_transfer_results = results_flipped


class Tandem(VllmCluster):
    """Both engines behind Tandem's frontend."""

    def start(self) -> None:
        self.environment["TANDEM_RUNTIME__LOG_LEVEL"] = "debug"
        self.environment["TANDEM_TRANSFER__EXCLUDE_AFTER"] = "1000"  # flips, of one prefill worker
        self.start_frontend()
        self.ports = {"decode": free_port(), "prefill": free_port()}
        for mode, port in self.ports.items():
            self.environment["TANDEM_SYSTEM_PORT"] = str(port)
            words = ("engine", "vllm", str(self.model), *WORDS, "--disaggregation-mode", mode)
            self.engine = self._start(*words)  # the prefill worker's, in the end

    async def turns(self, http: Any, prompt: list[int], between: Act | None = None) -> str:
        text, headers = await self.ask(http, prompt, "remote", max_tokens=1)
        self.place = f"{headers['x-tandem-prefill']}: {headers['x-tandem-prefill-reason']}"
        return text

    async def local(self, http: Any, prompt: list[int]) -> str:
        return await self.complete(http, prompt, "local", max_tokens=1)

    def handovers_ms(self) -> list[float]:
        """Return the times from the last computed block to the last proven one, by both logs."""
        proven = _stamps(self.log(1), "loaded in")
        computed = [at for at in _stamps(self.log(2), "computed") if at < proven[-1]]
        return [(min(end for end in proven if end > at) - at) * 1e3 for at in computed]


def _stamps(log: str, word: str) -> list[float]:
    lines = [line.split(" ")[0] for line in log.splitlines() if " ticket " in line and word in line]
    return [datetime.fromisoformat(stamp).timestamp() for stamp in lines]


class Nixl(VllmCluster):
    """Both engines of `vllm serve` with one of vLLM's own connectors."""

    def start(self) -> None:
        self.ports = {"decode": free_port(), "prefill": free_port()}
        self.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
        for mode, role in {"decode": "kv_consumer", "prefill": "kv_producer"}.items():
            self.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            transfer = {
                "kv_connector": CONNECTORS[self.name],
                "kv_role": role,
                "kv_buffer_device": "cpu",
                "kv_load_failure_policy": "recompute",
            }
            address = ("--host", "127.0.0.1", "--port", str(self.ports[mode]))
            connector = ("--kv-transfer-config", json.dumps(transfer))
            words = ("serve", str(self.model), *WORDS, *address, *connector)
            self.engine = self._start(*words, program=("-m", "vllm.entrypoints.cli.main"))

    async def turns(self, http: Any, prompt: list[int], between: Act | None = None) -> str:
        request_id, salt = new_id(), new_id()
        found = await self._ask(http, "prefill", prompt, request_id, salt, do_remote_decode=True)
        if between is not None:
            between()
        transfer = found["kv_transfer_params"]
        found = await self._ask(http, "decode", prompt, request_id, salt, **transfer)
        self.place = "remote"
        return str(found["choices"][0]["text"])

    async def local(self, http: Any, prompt: list[int]) -> str:
        found = await self._ask(http, "decode", prompt, new_id(), new_id())
        return str(found["choices"][0]["text"])

    async def _ask(
        self, http: Any, mode: str, prompt: list[int], request_id: str, salt: str, **transfer: Any
    ) -> Any:
        body = {"model": "random", "prompt": prompt, "max_tokens": 1, "temperature": 0,
                "cache_salt": salt, "kv_transfer_params": transfer or None}  # fmt: skip
        url = f"http://127.0.0.1:{self.ports[mode]}/v1/completions"
        async with http.post(url, json=body, headers={"X-Request-Id": request_id}) as answer:
            answer.raise_for_status()
            return await answer.json()


CONNECTORS = {"pull": "NixlConnector", "push": "NixlPushConnector"}
System = Tandem | Nixl


def check_needs(names: list[str]) -> None:
    """End this program, before it starts anything, where it lacks something."""
    check_version()
    if not CONNECTORS.keys().isdisjoint(names) and find_spec("nixl") is None:
        sys.exit("vLLM's connectors need `pip install --no-deps nixl==1.5.1` in this environment")
    shared, memory = shutil.disk_usage("/dev/shm").free, psutil.virtual_memory().available
    for what, free, num_gib in (("/dev/shm", shared, 1), ("memory", memory, 6)):
        if free < num_gib << 30:
            sys.exit(f"{what}: {free / 2**30:.1f} GiB free; two engines need {num_gib}")


def check_alive(system: System) -> None:
    assert all(each.poll() is None for each in system._running), "a process has ended"


def end(system: System) -> None:
    """End a system's processes; kill those that stay, as vLLM's do that end in mid-start."""
    ours = [psutil.Process(each.pid) for each in system._running if each.poll() is None]
    ours += [child for each in ours for child in each.children(recursive=True)]
    for process in system._running:
        process.terminate()
    for each in psutil.wait_procs(ours, END_S)[1]:
        each.kill()


async def wait_until_ready(http: Any, system: System) -> None:
    """Ask until the prefill engine computes a prompt; it gives the decode engine's own token."""
    prompt, began_at, system.place = random_prompt(500), time.perf_counter(), ""
    while not system.place.startswith("remote"):
        await asyncio.sleep(0.5)
        check_alive(system)
        assert time.perf_counter() < began_at + START_S, f"not ready in {START_S:.0f} s"
        with suppress(aiohttp.ClientError, TimeoutError, AssertionError):
            texts = {await system.local(http, prompt), await system.turns(http, prompt)}
    assert len(texts) == 1, texts
    print(f"ready | {system.name} | {time.perf_counter() - began_at:.0f} s", flush=True)


async def time_first_tokens(http: Any, system: System, rounds: int) -> float:
    """Print the medians; return that of a long prompt at the prefill engine, in seconds."""
    sizes, asks = (500, 2000, LONG), {"remote": system.turns, "local": system.local}
    times: dict[Any, list[float]] = {(size, place): [] for size in sizes for place in asks}
    for size, place in list(times) * rounds:
        began_at = time.perf_counter()
        await asks[place](http, random_prompt(size))
        times[size, place].append((time.perf_counter() - began_at) * 1e3)
    for size in sizes:
        remote, local = (
            f"{statistics.median(times[size, place]):.0f} ms {place}" for place in asks
        )
        print(f"first token of {size} | {system.name} | p50 {remote}, {local}", flush=True)
    if isinstance(system, Tandem):
        found = system.handovers_ms()
        print(f"handover | {system.name} | p50 {statistics.median(found):.1f} ms of {len(found)}")
    return statistics.median(times[LONG, "remote"]) / 1e3


async def fault(
    http: Any, system: System, what: str, act: Act, after_s: float | None, undo: Act | None = None
) -> None:  # fmt: skip
    """Act on a prompt on its way, or between both engines' turns (None); print its end."""
    check_alive(system)
    loop, prompt, hit_at = asyncio.get_running_loop(), random_prompt(LONG), time.perf_counter()

    def hit() -> None:
        nonlocal hit_at
        hit_at = time.perf_counter()
        act()
        if undo is not None:
            loop.call_later(STOP_S, undo)

    if after_s is not None:
        loop.call_later(after_s, hit)
    try:
        text = await system.turns(http, prompt, hit if after_s is None else None)
        waited_s = time.perf_counter() - hit_at
        is_right = text == await system.local(http, prompt)
        end = f"{'right' if is_right else 'WRONG'} ({system.place})"
    except (aiohttp.ClientError, TimeoutError) as error:
        waited_s, end = time.perf_counter() - hit_at, repr(error)
    print(f"{what} | {system.name} | {end} | {waited_s:.1f} s afterwards", flush=True)


async def callers_leave(http: Any, system: System, within_s: float) -> None:
    """Let 30 callers leave in every state; print the blocks in use, soon and after the lease."""
    room, num_right, shares = asyncio.Semaphore(3), 0, []

    async def leave() -> None:
        async with room:
            asking = asyncio.create_task(system.turns(http, random_prompt(2000)))
            await asyncio.wait([asking], timeout=random.uniform(0.0, within_s))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    await asyncio.gather(*(leave() for _ in range(30)))
    for wait_s in (4.0, LEASE_S):
        await asyncio.sleep(wait_s)
        for _ in range(3):
            prompt = random_prompt(300)
            num_right += await system.turns(http, prompt) == await system.local(http, prompt)
        await asyncio.sleep(1.0)
        shares.append([await kv_in_use(http, port) for port in system.ports.values()])
    end = f"KV in use at both after 4 s, and after the lease: {shares}; {num_right} of 6 right"
    print(f"30 callers leave | {system.name} | {end}", flush=True)


async def faults(http: Any, system: System, flip: Path, took_s: float) -> None:
    await callers_leave(http, system, took_s)
    for _ in range(3):
        await fault(http, system, "a bit flipped", flip.touch, 0.0)
    parts = parts_of(psutil.Process(system.engine.pid))
    for name in ("scheduler", "rank"):
        part = parts[name]
        await fault(http, system, f"{name} stopped", part.suspend, took_s / 3, part.resume)
        await asyncio.sleep(STOP_S)
    if system.name in CONNECTORS:
        part = parts["rank"]
        what = "rank stopped between the turns"
        await fault(http, system, what, part.suspend, None, part.resume)
        await asyncio.sleep(STOP_S)
        await fault(http, system, "rank killed between the turns", part.kill, None)
    else:
        await fault(http, system, "rank killed", parts["rank"].kill, took_s / 3)


async def main(rounds: int, names: list[str]) -> None:
    check_needs(names)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-compare-")))
        os.environ[FLIP] = str(folder / "flip")
        os.environ["PYTHONPATH"] = with_plugin(folder, PLUGIN)
        nats, etcd = stack.enter_context(NatsServer()), stack.enter_context(EtcdServer())
        shape = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256}
        model = write_random_model(folder / "model", **shape)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S))
        )
        for name in names:
            (folder / name).mkdir()
            kind = Nixl if name in CONNECTORS else Tandem
            system = kind(nats, etcd, model, folder / name)
            system.name = name
            try:
                system.start()
                await wait_until_ready(http, system)
                took_s = await time_first_tokens(http, system, rounds)
                await faults(http, system, folder / "flip", took_s)
            except Exception:
                for index in range(len(system._running)):
                    print(system.log(index)[-LOG_CHARS:], file=sys.stderr)
                raise
            finally:
                end(system)
            print(f"load | {name} | {os.getloadavg()}", flush=True)


if __name__ == "__main__":
    rounds, names = [*sys.argv[1:], *("10", "tandem,pull,push")[len(sys.argv) - 1 :]]
    asyncio.run(main(int(rounds), names.split(",")))
