import json

import pytest

from tandem.launch.doctor import checks_parts
from tandem.runtime.errors import ServiceError
from tandem.runtime.local import checks_machine
from tests.config.configs import config_of
from tests.launch.conftest import Tandem


@pytest.mark.slow
def test_doctor_finds_every_part_of_this_machine_in_order(tandem: Tandem) -> None:
    code, output, _ = tandem("doctor", "--json")
    findings = {finding["subject"]: finding for finding in json.loads(output)}
    assert code == 0, output
    for subject in ("python", "torch", "cpu kernels", "nats-server", "etcd", "nixl"):
        assert findings[subject]["grade"] == "ok"
    for subject in ("nats starts", "etcd starts"):
        assert findings[subject]["grade"] == "ok"
    assert "GB/s" in findings["nixl transfer"]["detail"]
    assert findings["ucx ports"]["grade"] == "ok"
    assert "listens on 127.0.0.1, with" in findings["ucx ports"]["detail"]


def test_a_failure_says_what_to_do_and_is_the_exit_code(
    tandem: Tandem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(arguments: list[str]) -> str:
        raise ServiceError("exit code -11: no output")

    monkeypatch.setattr(checks_parts, "_run_probe", crash)
    monkeypatch.setattr(checks_parts, "check_servers", lambda effective: iter(()))
    code, output, _ = tandem("doctor")
    assert code == 1
    assert "fail  nixl transfer: exit code -11" in output
    assert "-> without NIXL, prompts are prefilled on their decode worker only" in output


def test_a_probe_that_fails_is_a_typed_error_with_its_last_line() -> None:
    with pytest.raises(ServiceError, match="exit code 1: ValueError: no"):
        checks_parts._run_probe(["-c", "raise ValueError('no')"])


def test_memory_that_cannot_be_shared_between_processes_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    subjects = [f.subject for f in checks_machine.check_machine() if f.grade == "warn"]
    assert "PYTORCH_CUDA_ALLOC_CONF" in subjects


@pytest.mark.parametrize(
    ("host", "listens", "grade"),
    [
        ("127.0.0.1", ["10.0.0.9", "127.0.0.1"], "fail"),
        ("127.0.0.1", ["127.0.0.1"], "ok"),
        ("0.0.0.0", ["10.0.0.9", "127.0.0.1"], "warn"),
    ],
)
def test_ucx_ports_that_the_network_reaches_are_found(
    host: str, listens: list[str], grade: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"mebibytes": 64, "gb_per_s": 3.0, "both_know_us": 9.0, "is_intact": True}
    answer["listens"] = listens
    monkeypatch.setattr(checks_parts, "_run_probe", lambda arguments: json.dumps(answer))
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    transfer, ports = checks_parts.check_nixl(host)
    assert (transfer.grade, ports.grade) == ("ok", grade)


def test_configured_servers_that_cannot_be_reached_are_failures() -> None:
    flags = ["--runtime.nats_url=nats://127.0.0.1:9", "--runtime.etcd_endpoints=http://127.0.0.1:9"]
    findings = list(checks_parts.check_servers(config_of(*flags)))
    assert [f.grade for f in findings] == ["ok", "ok", "fail", "fail"]
    assert "nats://127.0.0.1:9" in findings[2].subject
