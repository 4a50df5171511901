"""The versions of etcd that are warned of, and where."""

import logging

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.store import etcd_client
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.runtime.store.etcd_versions import doubt_of, numbers_of


@pytest.mark.parametrize(
    "version", ["3.4.20", "3.5.0", "3.5.1", "3.5.2", "3.5.3", "3.6.1", "", "x"]
)
def test_three_versions_are_doubted_and_only_where_machines_share_them(version: str) -> None:
    is_bad = version in ("3.5.0", "3.5.1", "3.5.2")
    for hosts in (["10.0.0.1"], ["etcd.example"], ["127.0.0.1", "10.0.0.1"], ["2001:db8::1"]):
        assert bool(doubt_of(version, hosts)) is is_bad
    for hosts in ([], ["127.0.0.1"], ["::1"], ["localhost"]):
        assert doubt_of(version, hosts) == ""


def test_the_numbers_of_a_version_are_compared_as_numbers() -> None:
    assert numbers_of("etcd Version: 3.10.2\nGit SHA: 1a2b") == (3, 10, 2)
    assert numbers_of("3.10.2") > numbers_of("3.9.9") > numbers_of("") == ()


async def test_a_doubtful_server_is_a_warning_at_the_first_start_of_a_process(
    runtime_config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def doubt(version: str, hosts: list[str]) -> str:
        assert numbers_of(version) >= (3, 4)
        return f"a doubt about {hosts}"

    monkeypatch.setattr(etcd_client, "doubt_of", doubt)
    for _ in range(2):
        discovery = EtcdDiscovery(runtime_config)
        with caplog.at_level(logging.WARNING):
            await discovery.start()
        await discovery.close()
        assert discovery.doubt == "a doubt about ['127.0.0.1']"
    assert caplog.messages == [discovery.doubt]
