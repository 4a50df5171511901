"""The lines of `tandem status` about workers that cannot serve one another."""

from tandem.launch.cluster.fit import misfits
from tandem.runtime.membership.instance_report import InstanceReport
from tandem.runtime.wire.cluster_messages import Instance, LoadReport, WorkerRole, WorkerStatus


def worker(
    name: str, role: WorkerRole, deployment: str, model: str = "m", **details: str
) -> InstanceReport:
    component = "decode" if role == "both" else role
    instance = Instance(
        "tandem", component, "e", name, "127.0.0.1:1", "e1", model, deployment=deployment
    )
    load = LoadReport(name, "e1", role, 0, 0, 0, 10, 10, 0)
    fields = {"weights": "w", "kv_form": "f", "kv_layout": "l", "transport": "ucx"} | details
    return InstanceReport(instance, "serving", WorkerStatus(instance, "serving", load, fields))


def test_workers_of_one_deployment_and_of_several_models_need_no_line() -> None:
    fit = [worker("p1", "prefill", "a"), worker("d1", "decode", "a"), worker("d2", "both", "a")]
    assert misfits(fit) == []
    assert misfits([*fit, worker("d3", "decode", "b", model="n")]) == []
    frontend = Instance("tandem", "frontend", "http", "f", "127.0.0.1:1", "e1")
    assert misfits([*fit, InstanceReport(frontend, "ready")]) == []


def test_a_pair_that_does_not_fit_is_named_with_the_difference() -> None:
    one = [
        worker("p1", "prefill", "a"),
        worker("p2", "prefill", "b", transport="nixl", kv_layout="k"),
        worker("d1", "decode", "a"),
    ]
    [line] = misfits(one)
    assert (
        line
        == "prefill p2 does not fit decode d1: KV layout [k] and [l]; transport [nixl] and [ucx]"
    )


def test_a_decode_worker_that_no_prefill_worker_fits_is_named() -> None:
    lines = misfits([worker("p1", "prefill", "a"), worker("d1", "decode", "b", weights="v")])
    assert lines[0].endswith("weights [w] and [v]")
    [line, _] = misfits([worker("p1", "prefill", "a"), worker("d1", "decode", "b", kv_form="g")])
    assert line.endswith("form of K/V [f] and [g]")
    assert lines[1].startswith("decode d1: no prefill worker fits")
