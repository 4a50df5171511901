"""The config that every process needs to belong to a cluster."""

import socket
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from tandem.runtime.own_address import own_address
from tandem.runtime.port_range import checked_range, ports_of
from tandem.runtime.services_file import read_services

LogLevel = Literal["debug", "info", "warning", "error"]


class RuntimeConfig(BaseModel):
    """Addresses, leases and timeouts. Durations are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    namespace: str = Field("tandem", pattern=r"^[A-Za-z0-9_-]+$", description="name of the cluster")
    nats_url: str = Field(
        "nats://127.0.0.1:4222", description="URL of NATS with JetStream; commas between several"
    )
    etcd_endpoints: str = Field(
        "http://127.0.0.1:2379",
        description="URL of etcd, or of its unix socket; commas between several",
    )
    services_file: str | None = Field(
        None,
        description="JSON file with `nats_url` and `etcd_endpoints`, in place of these keys; read "
        "again while the services do not answer, so that they may come back elsewhere",
    )
    host: str = Field("127.0.0.1", description="address on which servers listen")
    interface: str | None = Field(
        None,
        min_length=1,
        description="interface whose address is `host`, as in eth0; `route`: the one on the way to "
        "etcd and NATS",
    )
    port: int = Field(
        0, ge=0, le=65535, description="port of the request plane; 0: one of `port_range`"
    )
    port_range: str | None = Field(
        None,
        description="ports of the request plane, as in 31000-31099: each process takes the first "
        "free one; null: any free port",
    )
    advertise_host: str | None = Field(
        None, description="address that peers connect to; null: `host`, or this machine's name"
    )
    lease_ttl_s: int = Field(
        10, ge=2, description="etcd lease: a crashed process leaves discovery after this long"
    )
    connect_timeout_s: float = Field(
        5.0, gt=0, description="longest attempt to reach NATS, etcd or a peer"
    )
    connect_attempts: int = Field(
        5, ge=1, description="attempts at start to reach NATS or etcd before giving up"
    )
    heartbeat_interval_s: float = Field(
        0.5, gt=0, description="time between heartbeats of processes on the request plane"
    )
    heartbeat_misses: int = Field(
        3, ge=1, description="missed heartbeats after which a peer is dead"
    )
    stall_timeout_s: float = Field(
        30.0, gt=0, description="a busy peer without progress for this long is dead"
    )
    cluster_token: SecretStr | None = Field(
        None, description="secret that processes of the cluster prove to each other to have"
    )
    tls_cert_file: str | None = Field(
        None,
        description="certificate of this process (PEM, with its chain): encrypts the request plane "
        "and is shown to NATS and etcd",
    )
    tls_key_file: str | None = Field(None, description="key of `tls_cert_file` (PEM)")
    tls_ca_file: str | None = Field(
        None,
        description="authorities whose certificates are accepted (PEM); null: for NATS and etcd "
        "those of the system",
    )
    pace: float = Field(
        1.0,
        ge=1,
        le=1000,
        description="time runs so many times slower, for emulated devices: every interval, target, "
        "lease and timeout, and all that is measured. Equal in all processes of a cluster",
    )
    log_level: LogLevel = Field("info", description="lowest level of log lines; live")
    log_format: Literal["text", "json"] = Field(
        "text", description="a log line: text, or a JSON object with the ids of request and trace"
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of the metrics server, 0: any free one; null: no such server",
    )
    trace_file: str | None = Field(
        None,
        min_length=1,
        description="Chrome trace of requests; every process writes its own file",
    )
    drain_timeout_s: float = Field(
        10.0, ge=0, description="time for running requests to finish when a process is ended"
    )

    @property
    def reachable_host(self) -> str:
        """The host under which other processes reach the servers of this one."""
        host = self.advertise_host or self.host
        return socket.gethostname() if host in ("0.0.0.0", "::", "") else host

    @property
    def listen_ports(self) -> list[int]:
        """The ports on which the request plane may listen, in order; 0 is any free one."""
        if self.port_range is not None:
            return list(ports_of(self.port_range))
        return [self.port]

    def with_current_services(self) -> Self:
        """Return the config with the addresses that `services_file` has now.

        Without such a file, or while it cannot be read, the config stays the same.
        """
        if self.services_file is None:
            return self
        try:
            return self.model_copy(update=read_services(self.services_file))
        except ValueError:
            return self

    _is_a_range = field_validator("port_range")(checked_range)

    @field_validator("services_file")
    @classmethod
    def _has_services(cls, path: str | None) -> str | None:
        if path is not None:
            read_services(path)
        return path

    @model_validator(mode="after")
    def _port_is_one_or_of_a_range(self) -> Self:
        if self.port and self.port_range is not None:
            raise ValueError("port and port_range exclude each other")
        return self

    @model_validator(mode="after")
    def _complete(self) -> Self:
        """Fill in what `services_file` and `interface` stand for."""
        found: dict[str, str] = {}
        if self.services_file is not None:
            found |= read_services(self.services_file)
        if self.interface is not None:
            if "host" in self.model_fields_set:
                raise ValueError("host and interface exclude each other")
            services = {"etcd_endpoints": self.etcd_endpoints, "nats_url": self.nats_url} | found
            try:
                found["host"] = own_address(self.interface, services.values())
            except ValueError as error:
                raise ValueError(f"interface {self.interface}: {error}") from None
        self.__dict__.update(found)
        return self

    @model_validator(mode="after")
    def _files_come_together(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file come together")
        if self.tls_cert_file is not None and self.tls_ca_file is None:
            raise ValueError("tls_cert_file needs tls_ca_file: each side checks the other's")
        return self
