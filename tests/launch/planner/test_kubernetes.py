"""The planner on Kubernetes: beside a mock of its API server, and a controller of Deployments."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import kmock
import pytest

from tandem.launch.planner import kubernetes
from tandem.launch.planner.kubernetes import KubernetesApi, KubernetesExecutor
from tandem.runtime.errors import ConfigError, ServiceError
from tandem.runtime.tasks import cancel
from tandem.runtime.wire.cluster_messages import Instance
from tests.services import eventually

NAMESPACE = "prod"
DEPLOYMENTS, PODS = "apps/v1/deployments", "v1/pods"
# What the executor asks for; the chart allows its pod just this.
NEEDED = {
    ("get", "deployments"),
    ("patch", "deployments/scale"),
    ("get", "pods"),
    ("patch", "pods"),
}
COST = "controller.kubernetes.io/pod-deletion-cost"


class Cluster:
    """Deployments whose pods come and go as a controller of Kubernetes has them."""

    def __init__(self, server: kmock.KubernetesEmulator) -> None:
        self.server = server
        self.most_ready = 100  # pods of a Deployment
        self._names = count()

    def deploy(self, name: str, replicas: int) -> None:
        self.server.objects[DEPLOYMENTS, NAMESPACE, name] = {
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"replicas": replicas},
        }
        self.reconcile()

    def replicas(self, name: str) -> int:
        return int(self.server.objects[DEPLOYMENTS, NAMESPACE, name]["spec"]["replicas"])

    def pods(self, name: str) -> list[str]:
        """The pods of a Deployment, those first that it would lose first."""
        found = [
            (float(pod["metadata"].get("annotations", {}).get(COST, 0)), key)
            for (resource, _, key), pod in self.server.objects.items()
            if resource.plural == "pods" and not pod.deleted and key.startswith(f"{name}-")
        ]
        return [key for _, key in sorted(found)]

    def reconcile(self) -> None:
        names = [key for r, _, key in self.server.objects if r.plural == "deployments"]
        for name in names:
            while len(self.pods(name)) < self.replicas(name):
                pod = f"{name}-6d4cf-{next(self._names)}"
                self.server.objects[PODS, NAMESPACE, pod] = {
                    "metadata": {
                        "name": pod,
                        "namespace": NAMESPACE,
                        "labels": {"pod-template-hash": "6d4cf"},
                        "ownerReferences": [{"kind": "ReplicaSet", "name": f"{name}-6d4cf"}],
                    }
                }
            for pod in self.pods(name)[: len(self.pods(name)) - self.replicas(name)]:
                self.server.objects[PODS, NAMESPACE, pod].delete()
            num_pods = len(self.pods(name))
            status = {"readyReplicas": min(num_pods, self.most_ready), "updatedReplicas": num_pods}
            self.server.objects[DEPLOYMENTS, NAMESPACE, name].patch({"status": status})

    async def run(self) -> None:
        while True:
            self.reconcile()
            await asyncio.sleep(0.05)


@asynccontextmanager
async def kubernetes_of(folder: Path) -> AsyncIterator[tuple[Cluster, KubernetesApi]]:
    (folder / "token").write_text("of-a-test\n")
    async with kmock.KubernetesEmulator() as emulator, kmock.Server(emulator) as server:
        cluster = Cluster(emulator)
        controller = asyncio.create_task(cluster.run())
        try:
            yield cluster, KubernetesApi(str(server.url).rstrip("/"), NAMESPACE, folder)
        finally:
            await cancel(controller)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "POLL_S", 0.05)


def executor_of(api: KubernetesApi) -> KubernetesExecutor:
    return KubernetesExecutor(api, ["worker=mine-both", "prefill=mine-prefill"], 30.0)


def worker_at(host: str) -> Instance:
    return Instance("0" * 16, "prod", "decode", "generate", "a:1", "m", host=host)


async def test_a_start_waits_for_pods_that_are_ready(tmp_path: Path) -> None:
    async with kubernetes_of(tmp_path) as (cluster, api):
        cluster.deploy("mine-both", 2)
        cluster.deploy("mine-prefill", 1)
        assert await executor_of(api).start("both", 2) == "2 pods of mine-both"
        assert (cluster.replicas("mine-both"), cluster.replicas("mine-prefill")) == (4, 1)
        assert len(cluster.pods("mine-both")) == 4


async def test_the_pod_of_the_worker_that_is_to_end_ends(tmp_path: Path) -> None:
    async with kubernetes_of(tmp_path) as (cluster, api):
        cluster.deploy("mine-both", 3)
        first, middle, last = cluster.pods("mine-both")
        await executor_of(api).stop(worker_at(middle))
        assert cluster.pods("mine-both") == [first, last]
        assert cluster.replicas("mine-both") == 2


async def test_it_asks_for_what_the_chart_allows_by_the_token_of_now(tmp_path: Path) -> None:
    async with kubernetes_of(tmp_path) as (cluster, api):
        cluster.deploy("mine-both", 2)
        executor = executor_of(api)
        await executor.start("both", 1)
        (tmp_path / "token").write_text("another")
        await executor.stop(worker_at(cluster.pods("mine-both")[0]))
        requests = list(cluster.server)
        asked = {
            (
                each.method.value.lower(),
                "/".join(filter(None, (each.resource.plural, each.subresource))),
            )
            for each in requests
        }
        assert asked == NEEDED
        tokens = [each.headers["Authorization"] for each in requests]
        assert (tokens[0], tokens[-1]) == ("Bearer of-a-test", "Bearer another")


async def test_pods_that_do_not_get_ready_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "START_TIMEOUT_S", 0.5)
    async with kubernetes_of(tmp_path) as (cluster, api):
        cluster.most_ready = 2
        cluster.deploy("mine-both", 2)
        with pytest.raises(ServiceError, match="2 of 3 pods of mine-both are ready after"):
            await executor_of(api).start("both", 1)
        assert cluster.replicas("mine-both") == 2


async def test_pods_that_an_earlier_planner_asked_for_count(tmp_path: Path) -> None:
    async with kubernetes_of(tmp_path) as (cluster, api):
        cluster.most_ready = 1
        cluster.deploy("mine-both", 2)
        starting = asyncio.create_task(executor_of(api).start("both", 1))
        await eventually(lambda: len(list(cluster.server)) > 3)
        assert cluster.replicas("mine-both") == 2
        cluster.most_ready = 2
        assert await starting == "1 pods of mine-both"


async def test_an_api_server_that_does_not_answer_for_a_while_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kubernetes_of(tmp_path) as (cluster, api):
        cluster.deploy("mine-both", 1)
        numbers, answers = count(), KubernetesApi.get

        async def get(self: KubernetesApi, path: str) -> Any:
            if next(numbers) == 1:  # the first after the change
                raise ServiceError("it is away")
            return await answers(self, path)

        monkeypatch.setattr(KubernetesApi, "get", get)
        assert await executor_of(api).start("both", 1) == "1 pods of mine-both"
        assert next(numbers) > 2


async def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    async with kubernetes_of(tmp_path) as (cluster, api):
        cluster.deploy("mine-both", 1)
        cluster.deploy("other", 1)
        executor = executor_of(api)
        with pytest.raises(ServiceError, match="no --deployment has workers of the role decode"):
            await executor.start("decode", 1)
        with pytest.raises(ServiceError, match="there is no Deployment mine-prefill"):
            await executor.start("prefill", 1)
        with pytest.raises(ServiceError, match="runs at elsewhere, no pod here"):
            await executor.stop(worker_at("elsewhere"))
        [other] = cluster.pods("other")
        with pytest.raises(ServiceError, match=f"pod {other} is of other, not of ours"):
            await executor.stop(worker_at(other))
        cluster.server["patch"] << 403 << {"kind": "Status", "message": "not for this account"}
        with pytest.raises(ServiceError, match=r"refuses PATCH .*not for this account"):
            await executor.start("both", 1)
    with pytest.raises(ServiceError, match="does not answer GET deployments/mine-both"):
        await executor.start("both", 1)


def test_a_pod_and_a_role_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="a pod with a service account"):
        KubernetesApi.of_this_pod(tmp_path)
    (tmp_path / "namespace").write_text("prod\n")
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST is not set"):
        KubernetesApi.of_this_pod(tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    api = KubernetesApi.of_this_pod(tmp_path)
    assert (api.url, api.namespace) == ("https://[fd00::1]:443", "prod")
    for each in ("both=mine", "worker=", "mine"):
        with pytest.raises(ConfigError, match="ROLE=NAME with a role of worker, decode, prefill"):
            KubernetesExecutor(api, [each], 30.0)
