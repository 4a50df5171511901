"""The cluster that a command means where several run on this machine."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tandem.config.session import Session
from tandem.runtime.errors import ConfigError
from tandem.runtime.local import local_clusters
from tandem.runtime.local.local_clusters import (
    LocalCluster,
    running_clusters,
    the_running_cluster,
)


def list_cluster(pid: int, namespace: str, **more: str) -> LocalCluster:
    """Write the record of a cluster whose launcher is alive."""
    etcd, http = f"http://127.0.0.1:{pid}", f"http://127.0.0.1:80{pid}"
    cluster = LocalCluster(pid, 1.0, namespace, "nats://127.0.0.1:1", etcd, http, "", **more)
    path = local_clusters.state_dir() / f"{pid}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(cluster)))
    return cluster


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(local_clusters, "started_s", lambda pid: 1.0)


def test_several_are_listed_with_the_flags_that_choose_one() -> None:
    list_cluster(11, "blue")
    list_cluster(12, "green")
    with pytest.raises(ConfigError, match="2 clusters run here") as caught:
        Session([]).load_for_cluster()
    assert caught.value.message.splitlines()[1:] == [
        "  --namespace blue   (http://127.0.0.1:8011)",
        "  --namespace green   (http://127.0.0.1:8012)",
    ]


def test_a_namespace_chooses_one() -> None:
    list_cluster(11, "blue")
    green = list_cluster(12, "green")
    session = Session([])
    session.set("runtime.namespace", "green", "--namespace")
    config = session.load_for_cluster().config.runtime
    assert (config.namespace, config.etcd_endpoints) == ("green", green.etcd_endpoints)


def test_those_of_one_namespace_are_told_apart_by_their_etcd() -> None:
    list_cluster(11, "blue")
    list_cluster(12, "blue")
    list_cluster(13, "green")
    with pytest.raises(ConfigError, match="2 clusters run here") as caught:
        the_running_cluster("blue")
    assert "--etcd-endpoints http://127.0.0.1:11 --namespace blue" in caught.value.message
    assert "green" not in caught.value.message


def test_the_only_one_is_it_whatever_the_namespace() -> None:
    blue = list_cluster(11, "blue")
    assert the_running_cluster() == the_running_cluster("other") == blue


def test_a_cluster_of_another_container_is_neither_found_nor_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = list_cluster(11, "blue", system="another-1")
    monkeypatch.setattr(local_clusters, "started_s", lambda pid: 2.0)  # another process's
    assert running_clusters() == []
    monkeypatch.setattr(local_clusters, "this_system", lambda: "another-1")
    monkeypatch.setattr(local_clusters, "started_s", lambda pid: 1.0)
    assert running_clusters() == [theirs]


def test_the_record_of_a_launcher_that_has_ended_is_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    list_cluster(11, "blue")
    monkeypatch.setattr(local_clusters, "started_s", lambda pid: 2.0)
    assert running_clusters() == []
    assert not list(local_clusters.state_dir().iterdir())
