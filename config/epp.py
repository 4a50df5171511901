"""The settings of the endpoint picker."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class EppConfig(BaseModel):
    """The address of `tandem epp`, and its limits for a Gateway's requests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address on which the gRPC server listens")
    port: int = Field(9002, ge=0, le=65535, description="its port; 0 takes a free one")
    tls_cert_file: str | None = Field(
        None, description="certificate of the gRPC server (PEM, with its chain); null: no TLS"
    )
    tls_key_file: str | None = Field(None, description="key of `tls_cert_file` (PEM)")
    max_requests: int = Field(
        4096,
        ge=1,
        description="most requests of the Gateway at one time, from their arrival to the end of "
        "their answer; above it 429",
    )
    timeout_s: float = Field(
        0.5,
        gt=0,
        le=60,
        description="longest time to read a prompt (s); after it a frontend chooses the worker",
    )

    @model_validator(mode="after")
    def _files_come_together(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file come together")
        return self
