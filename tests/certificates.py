"""Certificates made on the spot: an authority, and what it has signed."""

import subprocess
from pathlib import Path

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")


class Authority:
    """A certificate authority in a folder; `ca` is its certificate."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self.ca = folder / "ca.pem"
        _request(*_NEW_KEY, "-subj", "/CN=authority", keyout=folder / "ca.key", out=self.ca)

    def issue(self, *hosts: str) -> dict[str, str]:
        """The TLS fields of a config, with a certificate for these hosts."""
        name = hosts[0]
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        kinds = ("IP" if host[0].isdigit() else "DNS" for host in hosts)
        names = ",".join(f"{kind}:{host}" for kind, host in zip(kinds, hosts, strict=True))
        _request(
            *_NEW_KEY,
            *("-CA", str(self.ca), "-CAkey", str(self._folder / "ca.key")),
            *("-subj", f"/CN={name}", "-addext", f"subjectAltName={names}"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            keyout=key,
            out=cert,
        )
        return {"tls_cert_file": str(cert), "tls_key_file": str(key), "tls_ca_file": str(self.ca)}


def _request(*options: str, keyout: Path, out: Path) -> None:
    command = ["openssl", "req", "-x509", *options, "-keyout", str(keyout), "-out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
