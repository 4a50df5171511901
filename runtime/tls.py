"""TLS by files of the configuration: contexts for the ends of the request plane, NATS and etcd."""

import ssl
from pathlib import Path
from typing import NamedTuple

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError


class TlsFiles(NamedTuple):
    """The contents of the PEM files: authorities, own key and own certificates."""

    ca: bytes | None
    key: bytes | None
    cert: bytes | None


def server_context(config: RuntimeConfig) -> ssl.SSLContext | None:
    """Return the context of the request server, which asks for certificates; None without one.

    Raise ConfigError naming the field whose file cannot be used.
    """
    if config.tls_cert_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    _load(context, config)
    return context


def client_context(config: RuntimeConfig) -> ssl.SSLContext | None:
    """Return the context for dialing by the configured files; None without any.

    The server's certificate must name the host that is dialed. Raise ConfigError naming the field
    whose file cannot be used.
    """
    if config.tls_ca_file is None:  # it comes with the others
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(context, config)
    return context


def read_files(config: RuntimeConfig) -> TlsFiles:
    """Return the files' contents. Raise ConfigError naming the field whose file cannot be used."""
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), config)  # a wrong file gets an error naming it
    return TlsFiles(
        *(
            Path(path).read_bytes() if path is not None else None
            for path in (config.tls_ca_file, config.tls_key_file, config.tls_cert_file)
        )
    )


def check_pair(cert_file: str, key_file: str, section: str) -> None:
    """Raise ConfigError naming the field unless these are a certificate and its key."""
    load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cert_file, key_file, section)


def load_pair(context: ssl.SSLContext, cert_file: str, key_file: str, section: str) -> None:
    """Load a certificate and its key. Raise ConfigError naming the field."""
    for field, path in (("tls_cert_file", cert_file), ("tls_key_file", key_file)):
        _require_file(path, f"{section}.{field}")
    try:
        context.load_cert_chain(cert_file, key_file)
    except (OSError, ValueError) as error:
        key = f"{section}.tls_cert_file"
        raise ConfigError(
            f"{key}: {cert_file} and {key_file} are no certificate and its key in PEM: {error}",
            param=key,
        ) from error


def _load(context: ssl.SSLContext, config: RuntimeConfig) -> None:
    if config.tls_ca_file is not None:
        key = "runtime.tls_ca_file"
        _require_file(config.tls_ca_file, key)
        try:
            context.load_verify_locations(config.tls_ca_file)
        except (OSError, ValueError) as error:
            reason = f"{key}: {config.tls_ca_file} has no certificate in PEM: {error}"
            raise ConfigError(reason, param=key) from error
    if config.tls_cert_file is not None and config.tls_key_file is not None:
        load_pair(context, config.tls_cert_file, config.tls_key_file, "runtime")


def _require_file(path: str, key: str) -> None:
    try:
        with Path(path).open("rb"):
            return
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}", param=key) from error
