"""`tandem status`: the members of a cluster and their state, as they report it."""

import asyncio
import json
from dataclasses import replace

import msgspec
from rich.table import Table

from tandem.config.live import connected, live_settings, plain
from tandem.config.model import EffectiveConfig
from tandem.emulation.profile import MAX_LATE_SHARE
from tandem.launch.cluster.fit import misfits
from tandem.queue.jetstream import JetStreamQueue
from tandem.router.idle import IdlePrefill, idle_prefill
from tandem.runtime.address import EndpointAddress, new_id
from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.errors import ServiceError, TandemError
from tandem.runtime.local.ports import http_status
from tandem.runtime.membership.instance_report import CALL_TIMEOUT_S, InstanceReport, ask_worker
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.printable import masked
from tandem.runtime.process.lifecycle import started
from tandem.runtime.process.reporter import wide_console
from tandem.runtime.store.discovery import (
    Discovery,
    config_prefix,
    decode_card,
    decode_instance,
    models_prefix,
    read_instances,
    readable,
)
from tandem.runtime.store.planner_report import PlannerReport, decode_report, planner_prefix
from tandem.runtime.wire.cluster_messages import Instance, LinkReport, RoleName, WorkerStatus

WORKERS: tuple[RoleName, ...] = ("decode", "prefill")
COMPONENTS = ("frontend", *WORKERS)
THRESHOLDS = ("policy", "max_local_prefill_length", "max_prefill_queue_size")
TARGETS = ("ttft_target_ms", "itl_target_ms")  # shown where they are set


class QueueReport(msgspec.Struct, frozen=True):
    """The prefill queue of one deployment of a model; `error` when it could not be read."""

    model: str
    deployment: str
    num_jobs: int = 0
    num_tokens: int = 0
    num_in_progress: int = 0
    num_dead: int = 0
    error: str = ""


class ClusterReport(msgspec.Struct, frozen=True):
    """The content of `tandem status`."""

    namespace: str
    etcd_endpoints: str
    nats_url: str
    instances: list[InstanceReport]
    queues: list[QueueReport]
    thresholds: dict[str, str | int | float | bool | None]
    idle_prefill: list[IdlePrefill] = []
    planners: list[PlannerReport] = []


def run_status(effective: EffectiveConfig, *, as_json: bool) -> None:
    """Print the cluster's state. Raise ServiceError when etcd cannot be reached."""
    report = asyncio.run(read_cluster(effective))
    if as_json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        _print_report(report)


async def read_cluster(effective: EffectiveConfig) -> ClusterReport:
    """Read the instances from etcd, the state of each from itself, queue lengths from NATS."""
    runtime = effective.config.runtime
    async with connected(effective) as discovery:
        instances = await _read_instances(discovery, runtime.namespace)
        live = await discovery.get_prefix(config_prefix(runtime.namespace))
        planners = await discovery.get_prefix(planner_prefix(runtime.namespace))
    with_live = effective.with_settings(
        live_settings(runtime.namespace, live, lambda problem: None)
    )
    workers = [i for i in instances if i.namespace == runtime.namespace and i.component in WORKERS]
    deployments = sorted({(i.model, i.deployment) for i in workers if i.deployment})
    client = RequestClient(runtime, new_id())
    try:
        reports, queues = await asyncio.gather(
            asyncio.gather(*(_ask(client, instance) for instance in instances)),
            _read_queues(effective, deployments),
        )
    finally:
        await client.close()
    return ClusterReport(
        namespace=runtime.namespace,
        etcd_endpoints=runtime.etcd_endpoints,
        nats_url=masked(runtime.nats_url),
        instances=reports,
        queues=queues,
        thresholds={
            name: value
            for name in (*THRESHOLDS, *TARGETS)
            if (value := _in_force(name, reports, with_live)) is not None
        },
        idle_prefill=idle_prefill(each.worker for each in reports if each.worker is not None),
        planners=list(readable(planners.values(), decode_report)),
    )


def _in_force(
    name: str, reports: list[InstanceReport], effective: EffectiveConfig
) -> str | int | float | bool | None:
    """Return the value at the decode workers; all values where these were started with several."""
    key = f"disagg.{name}"
    found = {
        r.instance.instance_id[:8]: r.worker.details[key]
        for r in reports
        if r.worker is not None and key in r.worker.details
    }
    values = set(found.values())
    if len(values) > 1:
        return ", ".join(f"{value} at {instance}" for instance, value in found.items())
    value: str | int | float | bool | None = values.pop() if values else plain(effective, key)
    return value


async def _read_instances(discovery: Discovery, namespace: str) -> list[Instance]:
    by_id = await read_instances(discovery, namespace, COMPONENTS)
    cards = await discovery.get_prefix(models_prefix(namespace))
    for card in readable(cards.values(), decode_card):
        if not card.endpoint:
            continue
        # an author's worker in its own namespace, and the prefill engines beside it
        address = EndpointAddress.parse(card.endpoint)
        beside = replace(address, component="prefill")
        for prefix in (address.instance_key(card.instance_id), beside.key_prefix()):
            found = await discovery.get_prefix(prefix)
            for instance in readable(found.values(), decode_instance):
                if instance.instance_id not in by_id:
                    by_id[instance.instance_id] = msgspec.structs.replace(instance, model=card.name)
    return list(by_id.values())


async def _ask(client: RequestClient, instance: Instance) -> InstanceReport:
    if instance.component == "frontend":
        return InstanceReport(instance, await _frontend_state(instance.address))
    return await ask_worker(client, instance)


async def _frontend_state(address: str) -> str:
    scheme, _, place = address.rpartition("://")
    host, _, port = place.rpartition(":")
    try:
        status = await http_status(
            host.strip("[]"), int(port), "/health", CALL_TIMEOUT_S, scheme=scheme or "http"
        )
    except ServiceError as error:
        return f"no answer: {error}"
    return "ready" if status == 200 else "not ready"


async def _read_queues(
    effective: EffectiveConfig, deployments: list[tuple[str, str]]
) -> list[QueueReport]:
    if not deployments:
        return []
    runtime = effective.config.runtime
    connection = NatsConnection(runtime.model_copy(update={"connect_attempts": 1}))
    try:
        async with started(connection) as nats:
            return [await _read_queue(nats, effective, *each) for each in deployments]
    except TandemError as error:
        return [QueueReport(*each, error=str(error)) for each in deployments]


async def _read_queue(
    nats: NatsConnection, effective: EffectiveConfig, model: str, deployment: str
) -> QueueReport:
    config = effective.config
    queue = JetStreamQueue(nats, config.queue, config.runtime.namespace, model, deployment)
    try:
        depth = await queue.depth()
    except TandemError as error:
        return QueueReport(model, deployment, error=str(error))
    return QueueReport(
        *(model, deployment),
        *(depth.num_jobs, depth.num_tokens, depth.num_in_progress, depth.num_dead),
    )


# ---- as text ---------------------------------------------------------------------------------


def _print_report(report: ClusterReport) -> None:
    console = wide_console()
    console.print(
        f"namespace {report.namespace}  etcd {report.etcd_endpoints}  NATS {report.nats_url}\n"
    )
    if not report.instances:
        console.print("no instances are registered in this namespace")
        return
    console.print(_instances_table(report.instances))
    for note in [note for instance in report.instances for note in notes(instance)]:
        console.print(note)
    for line in [*misfits(report.instances), *(each.sentence for each in report.idle_prefill)]:
        console.print(line)
    console.print()
    for line in links(report):
        console.print(f"kv link {line}")
    for queue in report.queues:
        counts = (
            f"{queue.num_jobs} jobs, {queue.num_tokens} tokens waiting, "
            f"{queue.num_in_progress} in progress, {queue.num_dead} dead"
        )
        several = sum(each.model == queue.model for each in report.queues) > 1
        name = f"{queue.model}, deployment {queue.deployment}" if several else queue.model
        console.print(f"prefill queue of {name}: {queue.error or counts}")
    shown = ", ".join(f"{name} {value}" for name, value in report.thresholds.items())
    console.print(f"thresholds: {shown}")
    for line in planner_lines(report):
        console.print(line)


def planner_lines(report: ClusterReport) -> list[str]:
    """Return the last reading of each planner, in lines."""
    return [line for planner in report.planners for line in planner.lines]


def links(report: ClusterReport) -> list[str]:
    """Return a line for every KV link from a prefill worker to a decode worker."""
    return [
        f"{instance.instance.instance_id[:8]} -> {in_words(link)}"
        for instance in report.instances
        if instance.worker is not None
        for link in instance.worker.links
    ]


def in_words(link: LinkReport) -> str:
    """Return the measurements of a prefill worker's link to a decode worker."""
    streaming = (
        "no layer streaming"
        if link.min_streaming_tokens is None
        else f"layer streaming from {link.min_streaming_tokens} tokens"
    )
    return (
        f"{link.decode_instance[:8]}: {link.transport} {link.memory}, "
        f"{link.write_bytes_per_s / 1e9:.1f} GB/s, {link.overhead_us:.0f} us per write, "
        f"{streaming}{', broken, reconnecting' if link.is_broken else ''}"
    )


def notes(report: InstanceReport) -> list[str]:
    """Return a line for everything that an operator should look into at one worker."""
    details = {} if report.worker is None else report.worker.details
    num_quarantined, excluded = details.get("num_quarantined_blocks"), details.get("excluded")
    found = []
    if num_quarantined:
        found.append(
            f"{num_quarantined} blocks in quarantine, because writes may still land in them"
        )
    if excluded:
        found.append(f"takes no KV from {excluded}: its blocks failed verification repeatedly")
    late_share = details.get("late_share", 0.0)
    if isinstance(late_share, float) and late_share > MAX_LATE_SHARE:
        found.append(
            f"its emulated steps are {late_share:.0%} late, so that figures are not those of the "
            "device: raise --pace, or serve less"
        )
    name = f"{row_name(report)} {report.instance.instance_id[:8]}"
    return [f"{name}: {note}" for note in found]


def _instances_table(reports: list[InstanceReport]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("role", "instance", "epoch", "model", "address", "pid", "state"):
        table.add_column(heading, overflow="fold")
    for heading in ("tp", "running", "waiting", "kv used", "cached", "free"):
        table.add_column(heading, justify="right")
    for report in sorted(reports, key=place_of):
        instance = report.instance
        table.add_row(
            *(row_name(report), instance.instance_id[:8], instance.epoch[:8], instance.model),
            *(instance.address, f"{instance.pid}", report.state, _num_ranks(report.worker)),
            *_load_cells(report.worker),
        )
    return table


def row_name(report: InstanceReport) -> str:
    """Return the role; that of a connector, which has a row beside its engine's, says so."""
    is_connector = report.worker is not None and "engine" in report.worker.details
    return f"{report.role} connector" if is_connector else report.role


def place_of(report: InstanceReport) -> tuple[int, str]:
    """Return the sort key: Tandem's roles in the order of a request, then others by name."""
    component = report.instance.component
    known = COMPONENTS.index(component) if component in COMPONENTS else len(COMPONENTS)
    return known, component


def _num_ranks(worker: WorkerStatus | None) -> str:
    return "-" if worker is None else f"{worker.details.get('tp', '-')}"


def _load_cells(worker: WorkerStatus | None) -> list[str]:
    if worker is None:
        return ["-"] * 5
    load = worker.load
    requests = [f"{load.num_running}", f"{load.num_waiting}"]
    if not load.num_blocks:  # of an engine that keeps its pool to itself
        return [*requests, *["-"] * 3]
    num_used = load.num_blocks - load.num_free_blocks - load.num_cached_blocks
    used = f"{num_used} ({100 * num_used / load.num_blocks:.0f}%)"
    return [*requests, used, f"{load.num_cached_blocks}", f"{load.num_free_blocks}"]
