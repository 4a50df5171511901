"""NATS and etcd for several hosts, over TLS."""

from pathlib import Path

import pytest

from tandem.launch.supervise.network_servers import NetworkEtcd, NetworkNats
from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ServiceError
from tandem.runtime.process.lifecycle import started
from tandem.runtime.store.etcd import EtcdDiscovery
from tests.certificates import Authority


@pytest.mark.parametrize("has_tls", [True, False])
async def test_services_are_on_the_configs_address_and_keep_it_when_they_restart(
    tmp_path: Path, has_tls: bool
) -> None:
    files = Authority(tmp_path / "ours").issue("127.0.0.1") if has_tls else {}
    runtime = RuntimeConfig.model_validate({"host": "127.0.0.1", **files})
    async with NetworkNats(tmp_path, runtime) as nats, NetworkEtcd(tmp_path, runtime) as etcd:
        urls = nats.url, etcd.url
        assert [url.partition("://")[0] for url in urls] == (
            ["tls", "https"] if has_tls else ["nats", "http"]
        )
        await nats.restart()
        await etcd.restart()
        assert (nats.url, etcd.url) == urls
        config = runtime.model_copy(update={"nats_url": urls[0], "etcd_endpoints": urls[1]})
        async with started(EtcdDiscovery(config)) as discovery, started(NatsConnection(config)):
            await discovery.put("/x", b"1")
            assert await discovery.get_prefix("/x") == {"/x": b"1"}


async def test_without_a_certificate_of_the_authority_the_services_answer_nobody(
    tmp_path: Path,
) -> None:
    files = Authority(tmp_path / "ours").issue("127.0.0.1")
    runtime = RuntimeConfig.model_validate({"host": "127.0.0.1", **files})
    async with NetworkNats(tmp_path, runtime) as nats, NetworkEtcd(tmp_path, runtime) as etcd:
        stranger = RuntimeConfig(
            nats_url=nats.url,
            etcd_endpoints=etcd.url,
            tls_ca_file=files["tls_ca_file"],
            connect_attempts=1,
        )
        for part in (EtcdDiscovery(stranger), NatsConnection(stranger)):
            with pytest.raises(ServiceError):
                await part.start()
            await part.close()
