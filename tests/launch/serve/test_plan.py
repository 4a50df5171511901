from pathlib import Path

import pytest
from pydantic import SecretStr

from tandem.config.model import load_config
from tandem.config.topology import load_topology, parse_topology
from tandem.launch.serve.plan import LaunchPlan, RolePlan, make_plan, plan_one_more
from tandem.launch.serve.role_process import fork_server, role_process
from tandem.runtime.errors import ConfigError
from tandem.runtime.local.devices import GpuInfo
from tandem.runtime.wire.cluster_messages import Role
from tests.config.configs import config_of

GPUS = [GpuInfo(i, f"GPU model {i}", 80 << 30, str(i + 4)) for i in range(4)]


def plan_for(
    topology: str, num_gpus: int = 0, num_cores: int = 2, flags: list[str] | None = None
) -> LaunchPlan:
    config = config_of(*flags or [])
    return make_plan(load_topology(topology), config, GPUS[:num_gpus], num_cores)


def test_workers_come_before_the_frontend_that_needs_them() -> None:
    names = [role.name for role in plan_for("disagg-2p2d").roles]
    assert names == ["decode-0", "decode-1", "prefill-0", "prefill-1", "frontend-0"]


def test_without_a_gpu_workers_run_on_the_cpu_and_it_is_said() -> None:
    plan = plan_for("disagg-1p1d")
    assert {r.config.config.engine.device for r in plan.roles[:2]} == {"cpu"}
    assert any("no GPU" in note for note in plan.notes)


@pytest.mark.parametrize(("num_cores", "threads"), [(1, 1), (2, 1), (8, 4), (9, 4)])
def test_compute_roles_split_the_cores(num_cores: int, threads: int) -> None:
    plan = plan_for("disagg-1p1d", num_cores=num_cores)
    for role in plan.roles[:2]:
        assert role.config.config.engine.threads == threads
        assert role.variables["OMP_NUM_THREADS"] == str(threads)
    assert plan.roles[2].variables["OMP_NUM_THREADS"] == "1"


def test_ranks_of_a_worker_share_its_threads() -> None:
    plan = plan_for("disagg-1p1d", num_cores=8, flags=["--engine.tp=2"])
    assert {role.config.config.engine.threads for role in plan.roles[:2]} == {2}


def test_threads_somebody_asked_for_stay() -> None:
    plan = plan_for("disagg-1p1d", num_cores=8, flags=["--engine.threads=3"])
    assert plan.roles[0].config.config.engine.threads == 3
    assert plan.roles[0].variables["OMP_NUM_THREADS"] == "3"


def test_with_enough_gpus_each_worker_has_its_own() -> None:
    plan = plan_for("disagg-2p2d", num_gpus=4, num_cores=16)
    visible = [role.variables.get("CUDA_VISIBLE_DEVICES") for role in plan.roles]
    assert visible == ["4", "5", "6", "7", None]
    assert {r.config.config.engine.device for r in plan.roles[:4]} == {"cuda:0"}


def test_workers_that_share_a_gpu_share_its_memory_and_it_is_said() -> None:
    plan = plan_for("disagg-1p1d", num_gpus=1, num_cores=16)
    fractions = [role.config.config.engine.kv_memory_fraction for role in plan.roles[:2]]
    assert fractions == [0.425, 0.425]
    assert any("2 workers share 1 GPU" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("num_gpus", "flags", "are_forks"),
    [
        (0, [], True),
        (2, ["--engine.device=cpu"], True),
        (2, [], False),
        (0, ["--engine.emulate=h100/llama-3.1-8b"], False),
        (0, ["--runtime.pace=2"], False),
    ],
)
def test_workers_that_compute_on_a_cpu_are_forks(
    tmp_path: Path, num_gpus: int, flags: list[str], are_forks: bool
) -> None:
    plan = plan_for("disagg-1p1d", num_gpus=num_gpus, num_cores=16, flags=flags)
    forks = fork_server(plan.roles, tmp_path)
    assert (forks is not None) == are_forks
    if forks is not None:
        assert forks.environment["OMP_NUM_THREADS"] == "8"
        assert int(forks.environment["GOMP_SPINCOUNT"]) > 0


def test_workers_of_other_threads_load_their_libraries_themselves(tmp_path: Path) -> None:
    [one, _, frontend] = plan_for("disagg-1p1d", num_cores=8).roles
    [other, *_] = plan_for("disagg-1p1d", num_cores=4).roles
    forks = fork_server([one, frontend], tmp_path)
    assert forks is not None
    assert fork_server([one, other, frontend], tmp_path) is None
    assert role_process(one, tmp_path, forks=forks).forks is forks
    assert role_process(other, tmp_path, forks=forks).forks is None
    assert role_process(frontend, tmp_path, forks=forks).forks is None


def test_a_config_that_says_cpu_uses_no_gpu() -> None:
    plan = plan_for("disagg-1p1d", num_gpus=4, flags=["--engine.device=cpu"])
    assert [role.device for role in plan.roles] == [None, None, None]


def test_emulated_workers_use_no_gpu_and_it_is_said_at_which_pace_they_run() -> None:
    flags = ["--engine.emulate=h100/llama-3.1-8b", "--runtime.pace=4"]
    plan = plan_for("disagg-1p1d", num_gpus=2, flags=flags)
    assert all(role.device is None for role in plan.roles)
    assert {role.config.config.runtime.pace for role in plan.roles} == {4.0}
    (note,) = plan.notes
    assert "emulated h100/llama-3.1-8b" in note and "4 times slower" in note


def test_a_config_that_names_a_gpu_puts_all_workers_there() -> None:
    plan = plan_for("disagg-1p1d", num_gpus=4, flags=["--engine.device=cuda:2"])
    assert [role.device.index for role in plan.roles if role.device] == [2, 2]
    with pytest.raises(ConfigError, match=r"engine.device cuda:2 \(flag --engine.device\)"):
        plan_for("disagg-1p1d", num_gpus=1, flags=["--engine.device=cuda:2"])


def test_automatic_workers_avoid_the_gpus_that_others_name(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("roles:\n  frontend:\n  prefill:\n    gpu: 0\n  decode:\n    gpu: auto\n")
    plan = make_plan(parse_topology(path), load_config(), GPUS[:2], 8)
    assert [r.device.index for r in plan.roles if r.device] == [1, 0]


@pytest.mark.parametrize(
    ("num_gpus", "reason"),
    [(0, "this machine has no GPU; use `gpu: cpu`"), (1, r"has GPU 0 \(GPU model 0\)")],
)
def test_a_gpu_that_is_absent_is_named_with_those_there_are(
    tmp_path: Path, num_gpus: int, reason: str
) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("roles:\n  frontend:\n  decode:\n    gpu: 3\n")
    with pytest.raises(ConfigError, match=reason) as caught:
        make_plan(parse_topology(path), load_config(), GPUS[:num_gpus], 8)
    assert f"{path}:4: roles.decode.gpu 3" in caught.value.message


def test_a_worker_of_several_processes_has_as_many_gpus(tmp_path: Path) -> None:
    roles = plan_for("disagg-1p1d", num_gpus=4, flags=["--engine.tp=2"]).roles[:2]
    assert [role.variables["CUDA_VISIBLE_DEVICES"] for role in roles] == ["4,5", "6,7"]
    assert {role.config.config.engine.device for role in roles} == {"cuda:0"}
    assert {role.placement for role in roles} == {"2 x GPU model 0", "2 x GPU model 2"}

    path = tmp_path / "t.yaml"
    path.write_text(
        "roles:\n  frontend:\n  worker:\n    gpu: [3, 0]\n    config:\n      engine.tp: 2\n"
        "  decode:\n    gpu: auto\n"
    )
    worker, decode, _ = make_plan(parse_topology(path), load_config(), GPUS, 8).roles
    assert worker.variables["CUDA_VISIBLE_DEVICES"] == "7,4"
    assert decode.variables["CUDA_VISIBLE_DEVICES"] == "5"


def test_workers_of_several_gpus_share_them_where_there_are_too_few_for_all() -> None:
    plan = plan_for("disagg-1p1d", num_gpus=3, flags=["--engine.tp=2"])
    visible = [role.variables["CUDA_VISIBLE_DEVICES"] for role in plan.roles[:2]]
    assert visible == ["4,5", "6,4"]
    assert [r.config.config.engine.kv_memory_fraction for r in plan.roles[:2]] == [0.425, 0.425]
    assert any("2 workers share 3 GPUs" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("gpu", "tp", "reason"),
    [
        ("auto", 8, "4 GPUs for a worker of engine.tp 8; give it as many"),
        ("1", 2, "1 GPU for a worker of engine.tp 2; give it as many, as in `gpu: [0, 1]`"),
        ("[1, 1]", 2, "1 GPU for a worker of engine.tp 2"),
        ("[0, 1]", 1, "2 GPUs for each worker, whose engine.tp is 1"),
    ],
)
def test_a_worker_without_a_gpu_for_each_process_is_refused(
    tmp_path: Path, gpu: str, tp: int, reason: str
) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(f"roles:\n  frontend:\n  decode:\n    gpu: {gpu}\n")
    with pytest.raises(ConfigError) as caught:
        make_plan(parse_topology(path), config_of(f"--engine.tp={tp}"), GPUS, 8)
    assert reason in caught.value.message and "roles.decode.gpu" in caught.value.message


def test_a_topology_overrides_the_default_but_not_the_user() -> None:
    assert plan_for("aggregated").roles[0].config.config.disagg.policy == "always_local"
    chosen = plan_for("aggregated", flags=["--disagg.policy=threshold"])
    assert chosen.roles[0].config.config.disagg.policy == "threshold"


def test_a_secret_travels_in_the_environment_and_not_in_a_file() -> None:
    role = plan_for("aggregated", flags=["--runtime.cluster_token=hush"]).roles[0]
    inherited = {"PATH": "/bin", "TANDEM_ENGINE__THREADS": "9", "NATS_SERVER": "n:1"}
    environment = role.environment(inherited)
    assert environment["TANDEM_RUNTIME__CLUSTER_TOKEN"] == "hush"
    assert environment["PATH"] == "/bin"
    assert not environment.keys() & {"TANDEM_ENGINE__THREADS", "NATS_SERVER"}
    assert "hush" not in str(role.config_sections())
    assert role.config.config.runtime.cluster_token == SecretStr("hush")


def one_more(
    role: Role, topology: str, num_gpus: int = 0, flags: list[str] | None = None
) -> RolePlan:
    others = plan_for(topology, num_gpus=num_gpus, flags=flags).roles[:-1]
    config = config_of(*flags or [])
    return plan_one_more(role, load_topology(topology), config, others, GPUS[:num_gpus], 12)


def test_one_more_worker_has_the_settings_of_its_role_and_the_next_name() -> None:
    plan = one_more("decode", "aggregated")
    assert (plan.name, plan.role, plan.device) == ("decode-1", "decode", None)
    assert plan.config.config.disagg.policy == "always_local"
    assert plan.config.config.engine.threads == 6
    assert one_more("worker", "aggregated").name == "worker-0"  # of a role that nothing had


def test_one_more_worker_gets_the_gpu_that_is_left_or_none() -> None:
    plan = one_more("prefill", "disagg-1p1d", num_gpus=3)
    assert plan.device == GPUS[2] and plan.variables["CUDA_VISIBLE_DEVICES"] == "6"
    with pytest.raises(ConfigError, match="0 of 2 GPUs are without a worker: one more needs 1"):
        one_more("prefill", "disagg-1p1d", num_gpus=2)
    assert one_more("prefill", "disagg-1p1d", 2, ["--engine.device=cpu"]).device is None
    wide = one_more("decode", "aggregated", num_gpus=4, flags=["--engine.tp=2"])
    assert wide.gpus == tuple(GPUS[2:])
    with pytest.raises(ConfigError, match="1 of 3 GPUs are without a worker: one more needs 2"):
        one_more("decode", "aggregated", num_gpus=3, flags=["--engine.tp=2"])
