"""Every process of a `tandem serve` replaced by a successor, one at a time."""

import asyncio
import signal
from collections.abc import Callable, Sequence

from tandem.launch.cluster.one_worker import probe
from tandem.launch.serve.known import until_known
from tandem.launch.supervise.managed_process import ManagedProcess
from tandem.launch.supervise.supervisor import KILL_AFTER_DRAIN_S, local_instance
from tandem.runtime.address import new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ServiceError
from tandem.runtime.local.child_process import ChildProcess, describe_exit, log_tail
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.store.discovery import WatchView
from tandem.runtime.tasks import cancel
from tandem.runtime.wire.cluster_messages import Instance

ORDER = ("prefill", "decode", "worker", "frontend", "planner")


class Rollout:
    """Replaces children; `say` gets a sentence for each.

    A successor is registered and has answered before its elder drains. On a GPU, whose memory the
    elder has, and for a planner the elder ends first, and its keeper starts the successor.
    """

    def __init__(
        self,
        children: Sequence[ManagedProcess],
        instances: WatchView,
        runtime: RuntimeConfig,
        start_timeout_s: float,
        keep_alive_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._children = [child for kind in ORDER for child in children if child.kind == kind]
        self._instances = instances
        self._runtime = runtime
        self._start_timeout_s = start_timeout_s
        self._keep_alive_s = keep_alive_s
        self._say = say

    async def run(self) -> str:
        """Replace all, and return that in words.

        Raise ServiceError for a successor that does not serve; its elder stays.
        """
        for child in self._children:
            elder = child.child
            if child.placement == "CPU" and child.kind != "planner":
                await self._beside(child)
            else:
                await self._after(child)
            self._say(f"{child.name}: pid {elder.pid} is replaced by {child.child.pid}")
        return "every process is replaced"

    async def _beside(self, child: ManagedProcess) -> None:
        successor = await child.start_successor()
        is_adopted = False
        try:
            await self.until_serving(child, successor)
            elder = child.adopt(successor)
            is_adopted = True
        finally:
            if not is_adopted:
                successor.kill()
        await self._end(child, elder)

    async def _after(self, child: ManagedProcess) -> None:
        elder = child.child
        self._say(f"{child.name}: its successor starts when it has ended")
        await self._end(child, elder)
        async with asyncio.timeout(self._start_timeout_s):
            while child.child is elder:
                await asyncio.sleep(0.05)
        if child.kind != "planner":
            await self.until_serving(child, child.child)

    async def _end(self, child: ManagedProcess, elder: ChildProcess) -> None:
        """Let a process drain, and kill it when its time is up."""
        limit_s = self._runtime.drain_timeout_s + KILL_AFTER_DRAIN_S
        if child.kind == "frontend":
            elder.signal(signal.SIGUSR1)
            self._say(f"{child.name}: its clients' connections close, in {self._keep_alive_s:g} s")
            limit_s += self._keep_alive_s
        else:
            elder.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(limit_s):
                await elder.wait()
        except TimeoutError:
            self._say(f"{child.name}: pid {elder.pid} did not end in {limit_s:.0f} s; killed")
            elder.kill()
            await elder.wait()

    # ---- a successor --------------------------------------------------------------------------

    async def until_serving(self, child: ManagedProcess, process: ChildProcess) -> None:
        """Wait until a process is registered and has answered. Raise ServiceError if it fails."""
        serving = asyncio.create_task(self._answers(child.kind, process.pid))
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                tail = log_tail(child.log_path)
                how = describe_exit(ended.result())
                raise ServiceError(
                    f"the new process of {child.name} {how}; {child.log_path} ends:\n{tail}"
                )
            serving.result()
        except TimeoutError:
            limit = f"{self._start_timeout_s:.0f} s"
            raise ServiceError(
                f"the new process of {child.name} serves not after {limit}"
            ) from None
        finally:
            await cancel(serving)
            await cancel(ended)

    async def _answers(self, kind: str, pid: int) -> None:
        components = {"decode", "prefill"} if kind == "worker" else {kind}

        def found() -> dict[str, Instance]:
            return {each.component: each for each in self._local() if each.pid == pid}

        await self._instances.wait_for(lambda _: components <= set(found()), self._start_timeout_s)
        async with asyncio.timeout(self._start_timeout_s):
            await until_known(self._runtime, self._local)
        if (decode := found().get("decode")) is not None:
            client = RequestClient(self._runtime, new_id())
            try:
                await probe(client, decode)
            finally:
                await client.close()

    def _local(self) -> list[Instance]:
        found = (local_instance(value) for value in self._instances.items.values())
        return [each for each in found if each is not None]
