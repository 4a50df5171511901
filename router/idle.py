"""Prefill workers that idle while prompts wait, as the members of a cluster report it. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from msgspec import Struct

from tandem.router.predict import Pace, PlaceLoad
from tandem.runtime.wire.cluster_messages import LoadReport, WorkerStatus

LONG_WAIT_S = 1.0  # predicted for the next prompt of a decode worker
_LOCAL = "prompts.local."  # details of a decode worker: its local prompts by cause


class IdlePrefill(Struct, frozen=True):
    """One deployment of a model whose prefill workers idle while prompts wait elsewhere."""

    model: str
    deployment: str
    num_idle: int  # workers that take prompts and have none
    decode_instance: str  # where prompts wait for longest
    wait_s: float  # there, predicted for the next one; 0: not known
    num_waiting_tokens: int  # there
    cause: str = ""  # the commonest of prompts that stayed local; empty: none has yet
    num_local: int = 0  # of that cause

    @property
    def sentence(self) -> str:
        """A line for an operator."""
        where = f"at decode worker {self.decode_instance[:8]}"
        wait = f"{self.num_waiting_tokens} prompt tokens wait {where}"
        wait += f", {self.wait_s:.1f} s for the next prompt" if self.wait_s else ""
        why = f"; most local prompts: {self.cause} ({self.num_local})" if self.cause else ""
        return (
            f"prefill workers idle while prompts wait: {self.num_idle} of {self.model}; {wait}{why}"
        )


def idle_prefill(workers: Iterable[WorkerStatus]) -> list[IdlePrefill]:
    """Return each deployment where a worker that takes prompts has none, and others wait."""
    by_deployment = defaultdict(list)
    for worker in workers:
        instance = worker.instance
        by_deployment[instance.model, instance.deployment].append(worker)
    found = (_of_deployment(*key, each) for key, each in sorted(by_deployment.items()))
    return [each for each in found if each is not None]


def _of_deployment(
    model: str, deployment: str, workers: Sequence[WorkerStatus]
) -> IdlePrefill | None:
    num_idle = sum(worker.load.role != "decode" and _is_idle(worker.load) for worker in workers)
    decoders = [worker for worker in workers if worker.load.role != "prefill"]
    waits = [(_wait_s(worker.load), worker) for worker in decoders]
    waiting = [(wait_s, worker) for wait_s, worker in waits if wait_s is not None]
    if not num_idle or not waiting:
        return None
    wait_s, slowest = max(waiting, key=lambda each: each[0])
    causes = Counter[str]()
    for worker in decoders:
        for name, count in worker.details.items():
            if name.startswith(_LOCAL) and isinstance(count, int):
                causes[name.removeprefix(_LOCAL)] += count
    [(cause, num_local)] = causes.most_common(1) or [("", 0)]
    return IdlePrefill(
        model=model,
        deployment=deployment,
        num_idle=num_idle,
        decode_instance=slowest.instance.instance_id,
        wait_s=wait_s,
        num_waiting_tokens=slowest.load.num_waiting_tokens,
        cause=cause,
        num_local=num_local,
    )


def _is_idle(load: LoadReport) -> bool:
    return load.num_running == load.num_waiting == load.num_waiting_tokens == 0


def _wait_s(load: LoadReport) -> float | None:
    """Return the predicted wait of the next prompt, 0 where it is not known; None: none is long."""
    place = PlaceLoad.of(load)
    if place is None:
        return 0.0 if load.num_waiting else None
    wait_s = Pace.of(place).wait_s
    return wait_s if wait_s >= LONG_WAIT_S else None
