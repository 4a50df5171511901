"""A stand-in for Ray: runs a program whose actors are threads of its own process.

`python ray_stand_in.py PROGRAM ...` prints the bundle of each placement group.
"""

import runpy
import signal
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

THREADS = ThreadPoolExecutor()


class Actor:
    def __init__(self, instance: object) -> None:
        self._instance = instance

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(THREADS.submit, getattr(self._instance, name)))


def remote(**options: Any) -> Any:
    def actor_class(cls: type) -> Any:
        def placed(scheduling_strategy: dict[str, int], **resources: int) -> Any:
            bundle = {"num_cpus": "CPU", "num_gpus": "GPU"}
            assert {bundle[name]: count for name, count in resources.items()} == scheduling_strategy
            return SimpleNamespace(remote=lambda: Actor(cls()))

        return SimpleNamespace(options=placed)

    return actor_class


def get(futures: list[Future[Any]]) -> list[Any]:
    return [future.result() for future in futures]


def placement_group(bundles: list[dict[str, int]], strategy: str) -> dict[str, int]:
    assert strategy == "STRICT_PACK"
    print(*bundles, flush=True)
    return bundles[0]


def module(name: str, **names: Any) -> None:
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(names)


module("ray", remote=remote, get=get, init=lambda: None)
module("ray.util", placement_group=placement_group)
module("ray.util.scheduling_strategies", PlacementGroupSchedulingStrategy=lambda group: group)
sys.argv = sys.argv[1:]
# as in a terminal: a shell that runs its jobs in the background has them ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_path(sys.argv[0], run_name="__main__")
