"""Files and flags for services, and what becomes of them on a machine."""

from pathlib import Path

import pytest

from tandem.config.flags import split_flags
from tandem.launch.graph.graph_supervisor import runtime_variables
from tandem.launch.graph.plan import Machine, plan_services
from tandem.launch.graph.settings import ServiceNeeds, needs_of, read_services
from tandem.runtime.errors import ConfigError
from tandem.runtime.local.devices import GpuInfo
from tandem.sdk import service
from tandem.sdk.service.config import CONFIG_VARIABLE, ServiceConfig
from tandem.sdk.service.spec import Resources, spec_of
from tandem.sdk.worker.cluster import find_cluster
from tests.config.configs import config_of

GPUS = tuple(GpuInfo(i, f"GPU model {i}", 80 << 30, str(i + 4)) for i in range(3))
FILE = """
Common:
  model: bundled
  block-size: 64
  tls: true

Worker:
  common-configs: [model, block-size]
  block-size: 32
  ServiceArgs:
    workers: 2
    resources: {gpu: 1}

Front:
"""


@service(resources={"cpu": "1"})
class Worker: ...


@service
class Front: ...


SPECS = [spec_of(Worker), spec_of(Front)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "services.yaml"
    path.write_text(FILE)
    return path


def test_a_service_sees_its_section_and_what_it_wants_of_the_common_one(file: Path) -> None:
    config = read_services(file, [], SPECS)
    assert config.settings("Worker") == {"model": "bundled", "block-size": 32}
    assert config.settings("Front") == {}
    assert config["Worker"]["ServiceArgs"]["workers"] == 2


def test_flags_win_over_the_file_and_are_read_as_yaml(file: Path) -> None:
    flags = ["--Worker.block-size=8", "--Worker.ServiceArgs.workers=5", "--Front.list=[1, a]"]
    config = read_services(file, split_flags(flags)[1], SPECS)
    assert config.settings("Worker")["block-size"] == 8
    assert config.settings("Front") == {"list": [1, "a"]}
    needs = needs_of(spec_of(Worker), config)
    assert needs == ServiceNeeds(5, Resources(num_cpus=1.0, num_gpus=1))


def test_a_parser_of_arguments_gets_words(file: Path) -> None:
    flags = ["--Front.a=1", "--Front.on=true", "--Front.off=false", "--Front.map={k: 1}"]
    config = read_services(file, split_flags([*flags, "--Front.many=[x, y]"])[1], SPECS)
    words = ["--a", "1", "--on", "--map", '{"k": 1}', "--many", "x", "y"]
    assert config.as_args("Front") == words
    assert config.as_args("Worker", prefix="block-") == ["--size", "32"]


def test_a_missing_required_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Front.model must be set: --Front.model=VALUE"):
        ServiceConfig().require("Front", "model")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Wroker: {}", r":1: unknown key 'Wroker'; did you mean Worker\?"),
        ("Worker: 3", r":1: Worker must be a mapping"),
        ("Worker:\n  common-configs: [modle]\nCommon: {model: x}", "did you mean model"),
        ("Worker:\n  common-configs: model\nCommon: {model: x}", "must be a list of keys"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_services(path, [], SPECS)


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--Fornt.x=1", "flag --Fornt.x: unknown key 'Fornt'; did you mean Front"),
        (
            "--Worker.ServiceArgs.wrokers=1",
            "Worker.ServiceArgs: unknown key 'wrokers'; did you mea",
        ),
        ("--Worker.ServiceArgs.workers=many", "Worker.ServiceArgs.workers = 'many': must be a who"),
        (
            "--Worker.ServiceArgs.resources.gpus=1",
            "resources: unknown key 'gpus'; did you mean gpu",
        ),
        ("--Worker.block-size.x=1", "block-size is not a mapping"),
        ("--Worker.x=[", "--Worker.x=.: not valid YAML"),
    ],
)
def test_a_wrong_flag_is_refused_with_its_name(file: Path, flag: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        needs_of(spec_of(Worker), read_services(file, split_flags([flag])[1], SPECS))


def test_what_was_read_reaches_the_processes_by_a_private_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed = tmp_path / "services.json"
    read_services(file, [], SPECS).write(handed)
    assert handed.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv(CONFIG_VARIABLE, str(handed))
    monkeypatch.setattr(ServiceConfig, "_instance", None)
    assert ServiceConfig.get_instance().require("Worker", "model") == "bundled"


# ---- placement --------------------------------------------------------------------------------


def needs(num_workers: int = 1, **resources: float) -> ServiceNeeds:
    return ServiceNeeds(num_workers, Resources(**resources))  # type: ignore[arg-type]


def test_every_instance_has_gpus_of_its_own_and_others_see_none() -> None:
    wanted = [(SPECS[0], needs(1, num_gpus=2)), (SPECS[1], needs(2))]
    plans = plan_services(wanted, Machine(8, 1 << 40, GPUS))
    assert [plan.name for plan in plans] == ["Worker-0", "Front-0", "Front-1"]
    assert [plan.variables["CUDA_VISIBLE_DEVICES"] for plan in plans] == ["4,5", "", ""]
    assert plans[0].placement == "GPU 0 (GPU model 0), GPU 1 (GPU model 1)"
    assert plans[1].placement == "CPU"


def test_cores_set_the_threads_and_are_shared_without_a_request() -> None:
    wanted = [(SPECS[0], needs(1, num_cpus=3.5)), (SPECS[1], needs(1))]
    plans = plan_services(wanted, Machine(8, 1 << 40))
    assert [plan.variables["OMP_NUM_THREADS"] for plan in plans] == ["3", "4"]


def test_instances_have_ports_one_after_the_other() -> None:
    wanted = [(SPECS[0], needs(2))]
    machine = Machine(8, 1 << 40)
    assert [p.system_port for p in plan_services(wanted, machine, 9100)] == [9100, 9101]
    assert [p.system_port for p in plan_services(wanted, machine, 0)] == [0, 0]
    assert "TANDEM_SYSTEM_PORT" not in plan_services(wanted, machine)[0].variables


@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        ({"num_gpus": 2}, "Front asks for 2 x 2 GPUs, .* makes 5; this machine has 3\\."),
        ({"num_cpus": 4}, "Front asks for 2 x 4 cores, .* makes 8; this machine has 6\\."),
        ({"memory_bytes": 3 << 30}, "Front asks for 2 x 3 GiB .* makes 6; .* has 5\\."),
    ],
)
def test_too_little_is_refused_with_the_service_and_how_to_ask_for_less(
    resources: dict[str, float], reason: str
) -> None:
    wanted = [(SPECS[0], needs(1, num_gpus=1)), (SPECS[1], needs(2, **resources))]
    with pytest.raises(ConfigError, match=reason) as caught:
        plan_services(wanted, Machine(6, 5 << 30, GPUS))
    assert "--Front.ServiceArgs.resources." in caught.value.message


def test_a_process_finds_the_launchers_cluster_in_its_environment() -> None:
    flags = [
        *("--runtime.namespace=ours", "--runtime.nats_url=nats://there:1"),
        *("--runtime.cluster_token=hush", "--runtime.metrics_port=9100"),
    ]
    variables = runtime_variables(config_of(*flags))
    found = find_cluster(variables)
    assert (found.namespace, found.nats_url) == ("ours", "nats://there:1")
    assert found.etcd_endpoints == "http://127.0.0.1:2379"
    assert found.cluster_token is not None
    assert found.cluster_token.get_secret_value() == "hush"
    assert found.metrics_port is None  # the plan gives each instance one of its own
