"""Run with Ray 2.60 on one machine.

    python ray_workers.py /models/Qwen3-8B --workers 4 --config cluster.yaml

NATS, etcd and a frontend run elsewhere; cluster.yaml names them, and has runtime.interface. Each
worker is an actor in a placement group of its own, on one node with `tandem` in its PATH: it has a
GPU, or with --gpus 0 a core for each of its processes (--tp). Ctrl-C drains all.
"""

import argparse
import os
import subprocess
import time

import ray
from ray.util import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=2)
class Worker:
    def run(self, words: list[str]) -> int:
        """Run `tandem worker`, which dies with this actor."""
        command = ["setpriv", "--pdeathsig", "KILL", "tandem", "worker", *words]
        self.process = subprocess.Popen(command)
        code = self.process.wait()
        if code not in (0, 2):  # 2: a setting is wrong, and would be so again
            time.sleep(2)
            os._exit(1)  # Ray starts another actor, which runs this again
        return code

    def drain(self) -> None:
        self.process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser()
    for option, default in (("--workers", 2), ("--gpus", 1), ("--tp", 1)):
        parser.add_argument(option, type=int, default=default)
    own, words = parser.parse_known_args()
    words += [f"--tp={own.tp}"] if own.gpus else [f"--tp={own.tp}", "--gpu=cpu"]
    ray.init()
    workers = []
    for _ in range(own.workers):
        group = placement_group([{"CPU": own.tp, "GPU": own.gpus}], strategy="STRICT_PACK")
        place = PlacementGroupSchedulingStrategy(group)
        options = {"num_cpus": own.tp, "num_gpus": own.gpus, "scheduling_strategy": place}
        workers.append(Worker.options(**options).remote())
    runs = [worker.run.remote(words) for worker in workers]
    try:
        ray.get(runs)
    except KeyboardInterrupt:
        ray.get([worker.drain.remote() for worker in workers])
        ray.get(runs)


if __name__ == "__main__":
    main()
