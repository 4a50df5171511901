"""Starting and ending workers of Deployments on Kubernetes for the planner."""

import asyncio
import json
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tandem.config.topology import KEYS_OF_ROLES
from tandem.runtime.errors import ConfigError, ServiceError
from tandem.runtime.wire.cluster_messages import Instance, WorkerRole

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REQUEST_TIMEOUT_S = 10.0
POLL_S = 2.0
START_TIMEOUT_S = 1800.0  # as the chart's startup probe: of a model that is downloaded first
END_MARGIN_S = 60.0  # beyond the time that a worker has to drain
MAX_ANSWER_BYTES = 4 << 20
# The pod that a smaller number of replicas takes first: documented at ReplicaSet.
FIRST_TO_END = {"controller.kubernetes.io/pod-deletion-cost": "-2147483647"}

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    """The API server, for one namespace. `account` has `token`, which changes, and `ca.crt`."""

    url: str
    namespace: str
    account: Path = ACCOUNT

    @classmethod
    def of_this_pod(cls, account: Path = ACCOUNT) -> "KubernetesApi":
        """Return that of the cluster that runs this process; raise ConfigError outside of one."""
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{each}") for each in ("HOST", "PORT"))
        try:
            namespace = (account / "namespace").read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"--deployment needs a pod with a service account: {error}"
            ) from error
        if not host or not port:
            raise ConfigError("--deployment needs a pod: KUBERNETES_SERVICE_HOST is not set")
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", namespace, account)

    async def get(self, path: str) -> Object | None:
        """Return an object; None where there is none. Raise ServiceError."""
        return await asyncio.to_thread(self._ask, "GET", path, None)

    async def patch(self, path: str, change: Object) -> None:
        """Merge a change into an object. Raise ServiceError."""
        if await asyncio.to_thread(self._ask, "PATCH", path, change) is None:
            raise ServiceError(f"Kubernetes has no {path}")

    def _ask(self, method: str, path: str, change: Object | None) -> Object | None:
        group, _, rest = path.partition("/")
        prefix = "api/v1" if group == "pods" else "apis/apps/v1"
        url = f"{self.url}/{prefix}/namespaces/{self.namespace}/{group}/{rest}"
        headers = {"Accept": "application/json", "Content-Type": "application/merge-patch+json"}
        body = None if change is None else json.dumps(change).encode()
        try:
            headers["Authorization"] = f"Bearer {(self.account / 'token').read_text().strip()}"
            context = None
            if url.startswith("https:"):
                context = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
            asked = urllib.request.Request(url, body, headers, method=method)
            with urllib.request.urlopen(
                asked, timeout=REQUEST_TIMEOUT_S, context=context
            ) as answer:
                found = json.loads(answer.read(MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise ServiceError(f"Kubernetes refuses {method} {path}: {_message(error)}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise ServiceError(f"Kubernetes does not answer {method} {path}: {error}") from error
        if not isinstance(found, dict):
            raise ServiceError(f"Kubernetes answers {method} {path} with no object")
        return found


class KubernetesExecutor:
    """Changes the replicas of Deployments, each of workers of one role; waits for their pods."""

    def __init__(
        self, api: KubernetesApi, deployments: Sequence[str], drain_timeout_s: float
    ) -> None:
        """`deployments`: each ROLE=NAME, with the role as `tandem` names it in its commands.

        Raises ConfigError.
        """
        self._api, self._end_timeout_s = api, drain_timeout_s + END_MARGIN_S
        self._commands: dict[str, str] = {}  # of the workers of each Deployment
        commands = list(KEYS_OF_ROLES.values())
        for each in deployments:
            command, _, name = each.partition("=")
            if command not in commands or not name:
                raise ConfigError(
                    f"--deployment {each}: ROLE=NAME with a role of {', '.join(commands)}"
                )
            self._commands[name] = command

    async def start(self, role: WorkerRole, count: int) -> str:
        """Return once so many more pods are ready. Those that do not get ready are taken back.

        Pods that are not ready count, also those that an earlier planner asked for: so no bound is
        exceeded.
        """
        wanted_command = KEYS_OF_ROLES[role]
        name = next((name for name, of in self._commands.items() if of == wanted_command), None)
        if name is None:
            raise ServiceError(f"no --deployment has workers of the role {role}")
        num_asked, num_ready, _ = await self._replicas(name)
        wanted = num_ready + count
        await self._resize(name, max(wanted, num_asked))
        try:
            await self._until(partial(self._lacks, name, wanted), START_TIMEOUT_S)
        except ServiceError:
            await self._resize(name, num_asked)
            raise
        return f"{count} pods of {name}"

    async def stop(self, worker: Instance) -> None:
        """End the pod of a worker, and return when it has ended."""
        path = f"pods/{worker.host}"
        pod = await self._api.get(path)
        if pod is None:
            raise ServiceError(f"worker {worker.instance_id} runs at {worker.host}, no pod here")
        name = _deployment_of(pod)
        if name not in self._commands:
            raise ServiceError(f"pod {worker.host} is of {name or 'no Deployment'}, not of ours")
        num_asked, _, is_rolled_out = await self._replicas(name)
        if not is_rolled_out:
            raise ServiceError(f"{name} rolls out: no worker is ended")
        await self._api.patch(path, {"metadata": {"annotations": FIRST_TO_END}})
        await self._resize(name, num_asked - 1)
        await self._until(partial(self._remains, path), self._end_timeout_s)

    async def _replicas(self, name: str) -> tuple[int, int, bool]:
        """Return the pods that are asked for, the ready ones, and whether all are up to date."""
        found = await self._api.get(f"deployments/{name}")
        if found is None:
            raise ServiceError(f"there is no Deployment {name}")
        asked, status = found["spec"].get("replicas", 1), found.get("status") or {}
        return asked, status.get("readyReplicas", 0), status.get("updatedReplicas", 0) >= asked

    async def _resize(self, name: str, replicas: int) -> None:
        await self._api.patch(f"deployments/{name}/scale", {"spec": {"replicas": replicas}})

    async def _lacks(self, name: str, wanted: int) -> str:
        _, num_ready, _ = await self._replicas(name)
        return "" if num_ready >= wanted else f"{num_ready} of {wanted} pods of {name} are ready"

    async def _remains(self, path: str) -> str:
        return "" if await self._api.get(path) is None else f"{path} has not ended"

    async def _until(self, lack: Callable[[], Awaitable[str]], timeout_s: float) -> None:
        """Wait until nothing lacks; an API server that does not answer for a while is waited for.

        Raises ServiceError with what lacks.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                lacking = await lack()
            except ServiceError as error:
                lacking = str(error)
            if not lacking:
                return
            if time.monotonic() > end_s:
                raise ServiceError(f"{lacking} after {timeout_s:g} s")
            await asyncio.sleep(POLL_S)


def _deployment_of(pod: Object) -> str:
    """Return the Deployment of a pod: its ReplicaSet has that name and a hash; or nothing."""
    metadata = pod.get("metadata") or {}
    end = "-" + str((metadata.get("labels") or {}).get("pod-template-hash"))
    sets = (
        each["name"]
        for each in metadata.get("ownerReferences") or ()
        if each.get("kind") == "ReplicaSet" and each["name"].endswith(end)
    )
    return next(sets, "").removesuffix(end)


def _message(error: urllib.error.HTTPError) -> str:
    """Return the message of a Kubernetes Status, or that of HTTP."""
    try:
        return str(json.loads(error.read(MAX_ANSWER_BYTES))["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
