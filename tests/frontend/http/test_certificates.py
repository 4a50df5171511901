"""The certificate of the HTTP server, which is shown anew after a change of its files."""

import asyncio
import shutil
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.frontend.config import FrontendConfig
from tests.certificates import Authority
from tests.frontend.frontend_stack import Stack
from tests.services import eventually


def shown(address: str, ca: Path) -> str:
    """The serial number of the certificate that a new connection is shown."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=str(ca))
    with (
        socket.create_connection((host, int(port)), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname=host) as secured,
    ):
        certificate: Any = secured.getpeercert()
        return str(certificate["serialNumber"])


async def test_a_new_certificate_is_shown_and_a_broken_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tandem.runtime.process.watched_files._POLL_S", 0.01)
    authority = Authority(tmp_path / "authority")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def issue() -> None:
        pair = authority.issue("127.0.0.1")
        shutil.copy(pair["tls_key_file"], key)
        shutil.copy(pair["tls_cert_file"], cert)

    issue()
    config = FrontendConfig(port=0, tls_cert_file=str(cert), tls_key_file=str(key))
    async with Stack(config=config) as stack:

        async def serial() -> str:
            return await asyncio.to_thread(shown, stack.server.address, authority.ca)

        context = ssl.create_default_context(cafile=str(authority.ca))
        async with httpx.AsyncClient(verify=context) as client:
            url = f"https://{stack.server.address}/live"
            assert (await client.get(url)).status_code == 200
            first = await serial()
            issue()
            while (second := await serial()) == first:
                await asyncio.sleep(0.01)
            cert.write_text("no certificate")
            await eventually(lambda: "is not in force" in caplog.text)
            assert await serial() == second
            assert (await client.get(url)).status_code == 200  # on the connection from before
