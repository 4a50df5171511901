"""NATS and etcd for several hosts: on an address of this one, over TLS where the config has it."""

import asyncio
from pathlib import Path

from tandem.runtime.address import host_port
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.local.local_servers import LocalEtcd, LocalNats
from tandem.runtime.local.ports import free_port
from tandem.runtime.tls import client_context


class NetworkNats(LocalNats):
    """`nats-server` on `runtime.host`, for the user of its URL; with TLS for certificates too."""

    def __init__(self, run_dir: Path, runtime: RuntimeConfig) -> None:
        super().__init__(run_dir)
        self._runtime = runtime
        self.host = runtime.host
        self.scheme = "nats" if runtime.tls_cert_file is None else "tls"

    def _settings(self) -> dict[str, object]:
        runtime = self._runtime
        if runtime.tls_cert_file is None:
            return super()._settings()
        files = {
            "cert_file": runtime.tls_cert_file,
            "key_file": runtime.tls_key_file,
            "ca_file": runtime.tls_ca_file,
            "verify": True,
        }
        return {**super()._settings(), "tls": files}


class NetworkEtcd(LocalEtcd):
    """`etcd` on `runtime.host`; with TLS for those with a certificate of the same authority."""

    port = 0

    def __init__(self, run_dir: Path, runtime: RuntimeConfig) -> None:
        super().__init__(run_dir)
        self._runtime = runtime
        self._tls = client_context(runtime) if runtime.tls_cert_file is not None else None

    @property
    def url(self) -> str:
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{host_port(self._runtime.host, self.port)}"

    def _choose_address(self) -> None:
        super()._choose_address()  # of its peers, which it has none of
        self.port = free_port(self._runtime.host)

    def _client_words(self) -> list[str]:
        words = ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        runtime = self._runtime
        if runtime.tls_cert_file is None:
            return words
        files = {
            "--cert-file": runtime.tls_cert_file,
            "--key-file": runtime.tls_key_file,
            "--trusted-ca-file": runtime.tls_ca_file,
        }
        pairs = [word for option, path in files.items() for word in (option, str(path))]
        return [*words, "--client-cert-auth", *pairs]

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._runtime.host, self.port, ssl=self._tls)
