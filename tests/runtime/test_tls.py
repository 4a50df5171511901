"""TLS by files: who gets in, and what can be read on the way."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import ValidationError

from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ConfigError, ConnectionLostError, ServiceError, TandemError
from tandem.runtime.local.ports import http_status
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.plane.server import RequestServer
from tandem.runtime.process.http_server import HttpServer
from tandem.runtime.process.lifecycle import started
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.runtime.tls import check_pair
from tests.certificates import Authority
from tests.runtime.plane.eavesdropper import Eavesdropper
from tests.runtime.plane.ends import calling, echo, serving
from tests.services import EtcdServer, NatsServer

Files = dict[str, str]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def files(authority: Authority) -> Files:
    return authority.issue("127.0.0.1", "localhost")


def config_of(files: Files, **fields: object) -> RuntimeConfig:
    return RuntimeConfig.model_validate({"connect_attempts": 1, **files, **fields})


async def call(server: RequestServer, config: RuntimeConfig, address: str = "") -> bytes:
    async with calling(config) as client:
        return await client.call(address or server.address, "echo", b"prompt", RequestContext())


# ---- the request plane ------------------------------------------------------------------------


async def test_processes_with_certificates_talk_and_nothing_can_be_read(files: Files) -> None:
    async with serving(config_of(files), {"echo": echo}) as server:
        between = Eavesdropper(server.address)
        async with await asyncio.start_server(between, "127.0.0.1", 0) as fake:
            host, port = fake.sockets[0].getsockname()
            assert await call(server, config_of(files), f"{host}:{port}") == b"prompt"
    assert between.from_client and b"prompt" not in between.from_client
    assert between.from_server and b"prompt" not in between.from_server


async def test_strangers_get_no_connection(files: Files, tmp_path: Path) -> None:
    """Without TLS; with a certificate of another authority, on either side; for another host."""
    others = Authority(tmp_path / "theirs").issue("127.0.0.1")
    theirs = [
        RuntimeConfig(),
        config_of(others),
        config_of({**others, "tls_ca_file": files["tls_ca_file"]}),
    ]
    async with serving(config_of(files), {"echo": echo}) as server:
        for config in theirs:
            with pytest.raises(TandemError):
                await call(server, config)
        assert await call(server, config_of(files)) == b"prompt"


async def test_a_certificate_names_the_host_that_is_dialed(
    authority: Authority, files: Files
) -> None:
    async with serving(config_of(authority.issue("elsewhere.test"))) as server:
        with pytest.raises(ConnectionLostError, match="certificate verify failed"):
            await call(server, config_of(files))


# ---- NATS and etcd ----------------------------------------------------------------------------


class TlsNats(NatsServer):
    """It asks clients for a certificate."""

    def __init__(self, files: Files) -> None:
        super().__init__()
        self._files = files

    @property
    def url(self) -> str:
        return f"tls://127.0.0.1:{self.port}"

    def command(self, store: Path) -> list[str]:
        files = self._files
        return [
            *(*super().command(store), "--tlsverify", "--tlscacert", files["tls_ca_file"]),
            *("--tlscert", files["tls_cert_file"], "--tlskey", files["tls_key_file"]),
        ]


class TlsEtcd(EtcdServer):
    """It asks clients for a certificate."""

    def __init__(self, files: Files) -> None:
        super().__init__()
        self._files = files
        self.context = ssl.create_default_context(cafile=files["tls_ca_file"])
        self.context.load_cert_chain(files["tls_cert_file"], files["tls_key_file"])

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def command(self, store: Path) -> list[str]:
        files = self._files
        return [
            *(*super().command(store), "--client-cert-auth"),
            *("--trusted-ca-file", files["tls_ca_file"], "--cert-file", files["tls_cert_file"]),
            *("--key-file", files["tls_key_file"]),
        ]


async def connects_to_nats(config: RuntimeConfig) -> None:
    async with started(NatsConnection(config)):
        pass


async def connects_to_etcd(config: RuntimeConfig) -> None:
    async with started(EtcdDiscovery(config)) as discovery:
        await discovery.put("/x", b"1")
        assert await discovery.get_prefix("/x") == {"/x": b"1"}


async def test_nats_and_etcd_are_reached_over_tls_with_a_certificate_only(
    files: Files, tmp_path: Path
) -> None:
    others = Authority(tmp_path / "theirs").issue("127.0.0.1")
    with TlsNats(files) as nats, TlsEtcd(files) as etcd:
        urls = {"nats_url": nats.url, "etcd_endpoints": etcd.url}
        several = {**urls, "etcd_endpoints": f"https://127.0.0.1:1,{etcd.url}"}
        for connects in (connects_to_nats, connects_to_etcd):
            await connects(config_of(files, **urls))
            for wrong in ({"tls_ca_file": files["tls_ca_file"]}, others):
                with pytest.raises(ServiceError):
                    await connects(config_of(wrong, **urls))
        await connects_to_etcd(config_of(files, **several))


async def test_a_tls_url_is_never_spoken_to_in_the_clear(files: Files, nats: NatsServer) -> None:
    url = f"tls://user:password@127.0.0.1:{nats.port}"
    with pytest.raises(ServiceError, match="offers no TLS"):
        await connects_to_nats(config_of(files, nats_url=url))
    with pytest.raises(ConfigError, match="mixes http and https"):
        EtcdDiscovery(config_of(files, etcd_endpoints="https://a:1,http://b:1"))


# ---- HTTP, and wrong files --------------------------------------------------------------------


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


async def test_http_is_served_over_tls(files: Files) -> None:
    pair = {key: files[key] for key in ("tls_cert_file", "tls_key_file")}
    server = HttpServer(hello, "127.0.0.1", 0, param="frontend.port", **pair)
    server.bind()
    server.serve()
    context = ssl.create_default_context(cafile=files["tls_ca_file"])
    url = f"https://{server.address}/"
    async with aiohttp.ClientSession() as session, session.get(url, ssl=context) as response:
        assert (response.status, await response.read()) == (200, b"https")
    assert await http_status("127.0.0.1", server.port, "/", scheme="https") == 200
    with pytest.raises(ServiceError):
        await http_status("127.0.0.1", server.port, "/")
    await server.close()


async def test_a_wrong_file_is_an_error_that_names_its_field(files: Files, tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for field in files:
        for path in (broken, tmp_path / "missing.pem"):
            config = config_of({**files, field: str(path)})
            with pytest.raises(ConfigError, match=r"runtime\.tls_") as caught:
                await RequestServer(config, "server").start()
            assert str(path) in caught.value.message
            with pytest.raises(ConfigError, match=r"runtime\.tls_"):
                RequestClient(config, "client")
    with pytest.raises(ConfigError, match=r"frontend\.tls_key_file"):
        check_pair(files["tls_cert_file"], str(tmp_path / "missing.pem"), "frontend")
    for lone in files:
        if lone != "tls_ca_file":
            with pytest.raises(ValidationError, match="come together"):
                config_of({lone: files[lone]})
    with pytest.raises(ValidationError, match="needs tls_ca_file"):
        config_of({key: path for key, path in files.items() if key != "tls_ca_file"})
