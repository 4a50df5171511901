"""What every process is told about the cluster it belongs to."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class RuntimeConfig(BaseModel):
    """Addresses, leases and patience; frozen, unknown keys are errors. Durations are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    namespace: str = Field("tandem", pattern=r"^[A-Za-z0-9_-]+$")  # name of the cluster
    nats_url: str = "nats://127.0.0.1:4222"  # URL of NATS with JetStream, or several by comma
    etcd_endpoints: str = "http://127.0.0.1:2379"  # URL of etcd, or several by comma
    host: str = "127.0.0.1"  # what servers bind to
    advertise_host: str | None = None  # what peers dial; None: host, or this host's name
    lease_ttl_s: int = Field(10, ge=2)  # who dies without a word is forgotten after this
    connect_timeout_s: float = Field(5.0, gt=0)  # of one attempt to reach NATS, etcd or a peer
    connect_attempts: int = Field(5, ge=1)  # at start, before giving up on NATS or etcd
    heartbeat_interval_s: float = Field(0.5, gt=0)  # between processes on the request plane
    heartbeat_misses: int = Field(3, ge=1)  # intervals of silence after which a peer is dead
    stall_timeout_s: float = Field(30.0, gt=0)  # busy without progress for so long is dead
    cluster_token: SecretStr | None = None  # what peers must present to each other
    log_level: Literal["debug", "info", "warning", "error"] = "info"  # least serious level logged
    metrics_port: int | None = Field(None, ge=0, le=65535)  # None: no metrics server
    trace_file: str | None = Field(None, min_length=1)  # Chrome trace of requests, per worker
    drain_timeout_s: float = Field(10.0, ge=0)  # for running requests when a process is ended
