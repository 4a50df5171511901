"""How a process finds the cluster it belongs to."""

import os
from pathlib import Path

import pytest

from tandem.runtime.errors import ConfigError
from tandem.runtime.local.local_clusters import LocalCluster, announced, started_s
from tandem.sdk import find_cluster


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def local(namespace: str) -> LocalCluster:
    return LocalCluster(
        pid=os.getpid(),
        started_s=started_s(os.getpid()),
        namespace=namespace,
        nats_url="nats://127.0.0.1:1",
        etcd_endpoints="http://127.0.0.1:2",
        http_url="",
        run_dir="",
    )


def test_an_empty_environment_means_the_defaults() -> None:
    config = find_cluster({})
    assert (config.namespace, config.nats_url) == ("tandem", "nats://127.0.0.1:4222")


def test_every_field_has_its_variable() -> None:
    config = find_cluster(
        {
            "TANDEM_RUNTIME__NAMESPACE": "mine",
            "TANDEM_RUNTIME__LEASE_TTL_S": "7",
            "TANDEM_RUNTIME__METRICS_PORT": "none",
            "TANDEM_RUNTIME__CLUSTER_TOKEN": "secret",
        }
    )
    assert (config.namespace, config.lease_ttl_s, config.metrics_port) == ("mine", 7, None)
    assert config.cluster_token is not None
    assert config.cluster_token.get_secret_value() == "secret"


def test_the_two_addresses_have_names_of_their_own() -> None:
    config = find_cluster(
        {"NATS_SERVER": "nats://n:4222", "ETCD_ENDPOINTS": "a:2379,http://b:2379"}
    )
    assert config.nats_url == "nats://n:4222"
    assert config.etcd_endpoints == "http://a:2379,http://b:2379"


def test_the_level_of_the_log_has_another_name() -> None:
    assert find_cluster({"DYN_LOG": "trace"}).log_level == "debug"
    assert find_cluster({"DYN_LOG": "some_module=trace"}).log_level == "info"


def test_the_longer_name_wins() -> None:
    environment = {"NATS_SERVER": "nats://n:1", "TANDEM_RUNTIME__NATS_URL": "nats://n:2"}
    assert find_cluster(environment).nats_url == "nats://n:2"


def test_the_cluster_of_this_machine_is_found_unless_an_address_is_given() -> None:
    with announced(local("here")):
        found = find_cluster({"TANDEM_RUNTIME__LEASE_TTL_S": "7"})
        assert (found.namespace, found.nats_url) == ("here", "nats://127.0.0.1:1")
        assert found.lease_ttl_s == 7
        assert find_cluster({"NATS_SERVER": "nats://n:1"}).namespace == "tandem"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TANDEM_RUNTIME__LEASE_TTL_S", "soon"),
        ("TANDEM_RUNTIME__LEASE_TTL", "7"),
        ("TANDEM_RUNTIME_LEASE_TTL_S", "7"),
    ],
)
def test_what_is_wrong_is_named_by_its_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        find_cluster({name: value})
    assert caught.value.param == name
