"""`tandem serve`: the roles of one machine as children of the launcher."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem.launch.config.model import EffectiveConfig
from tandem.launch.devices import list_gpus, num_usable_cores
from tandem.launch.serve.plan import make_plan
from tandem.launch.serve.role_process import RoleProcess
from tandem.launch.serve.topology import Topology
from tandem.launch.supervise.keeper import Keeper, dialled, local_pid
from tandem.launch.supervise.reporter import Reporter
from tandem.runtime.discovery import WatchView
from tandem.runtime.etcd import EtcdDiscovery

DRAIN_ORDER = ("frontend", "decode", "prefill")  # callers first: what they call still answers


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve and how. `embed_*`: start that service here instead of joining one."""

    config: EffectiveConfig
    topology: Topology
    model: str
    model_name: str
    run_dir: Path
    embed_nats: bool = True
    embed_etcd: bool = True
    verbose: bool = False
    start_timeout_s: float = 600.0


class Supervisor(Keeper):
    """Runs a topology until a signal ends it."""

    def __init__(self, options: ServeOptions, reporter: Reporter) -> None:
        super().__init__(
            options.config,
            reporter,
            options.run_dir,
            embed_nats=options.embed_nats,
            embed_etcd=options.embed_etcd,
            is_verbose=options.verbose,
            start_timeout_s=options.start_timeout_s,
        )
        self._options = options
        self._roles: list[RoleProcess] = []

    async def _start_children(self, discovery: EtcdDiscovery) -> None:
        plan = make_plan(self._options.topology, self._config, list_gpus(), num_usable_cores())
        for note in plan.notes:
            self._say.note(note)
        for role_plan in plan.roles:
            role = RoleProcess(
                role_plan, self._options.model, self._options.model_name, self._options.run_dir
            )
            self._roles.append(role)
            await self._start_child(role)
        names = ", ".join(role.name for role in self._roles)
        self._say.working(f"loading {self._options.model_name}: {names}")
        view = discovery.watch(f"/tandem/{self._config.config.runtime.namespace}/instances/")
        await view.ready()
        view.subscribe(self._instance_changed)
        await self._unless_one_dies(self._until_ready(view))

    async def _until_ready(self, view: WatchView) -> None:
        workers = [role for role in self._roles if role.plan.role != "frontend"]
        await view.wait_for(
            lambda items: {role.pid for role in workers} <= {local_pid(v) for v in items.values()},
            self._options.start_timeout_s,
        )
        await self._until_answers("/health")

    def _instance_changed(self, key: str, value: bytes | None) -> None:
        pid = local_pid(value) if value is not None else None
        for role in self._roles:
            if pid is not None and role.pid == pid and role.announced_pid != pid:
                role.announced_pid = pid
                self._say.done(f"{role.name} is ready ({role.where}, pid {pid})")

    def _drain_order(self) -> Sequence[Sequence[RoleProcess]]:
        return [[role for role in self._roles if role.plan.role == kind] for kind in DRAIN_ORDER]

    def _is_announced(self) -> bool:
        return True

    def _http_url(self) -> str:
        frontend = self._config.config.frontend
        return f"http://{dialled(frontend.host)}:{frontend.port}"

    def _report_ready(self) -> None:
        topology, url = self._options.topology, self._http_url()
        body = msgspec.json.encode(
            {
                "model": self._options.model_name,
                "messages": [{"role": "user", "content": "Tell me a story."}],
                "max_tokens": 64,
            }
        ).decode()
        self._say.done(f"ready: {url} serves {self._options.model_name} ({topology.description})")
        self._say.output(
            f"\ncurl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
        )
        self._say.note(f"logs: {self._options.run_dir}")
        if topology.count("prefill"):
            disagg = self._roles[0].plan.config.config.disagg
            self._say.note(
                f"policy {disagg.policy}, prompts up to {disagg.max_local_prefill_length} uncached "
                "tokens stay on their decode worker; change it while serving: "
                "tandem config set disagg.max_local_prefill_length 512"
            )
        self._say.note("Ctrl-C stops; tandem status shows what is going on")
