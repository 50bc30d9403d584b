"""Configuration of a service: flags over environment over file over defaults.

Every service has a subclass of `ServiceConfig`, whose fields are documented below them. An unknown key is an error
in every source, so that a misspelled setting is never silently ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from paceline.address import is_loopback
from services.platform.config.store_url import parse_store_url


class TlsConfig(BaseModel):
    """Certificates, as PEM files, of this service as a server and as a client of its peers."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    cert_file: Path | None = None
    """Certificate chain of this process. Needed to serve, and to dial peers that require one."""
    key_file: Path | None = None
    """Private key of `cert_file`."""
    ca_file: Path | None = None
    """Authorities that peers' certificates must come from. Unset: the system's, and none for clients."""
    client_auth: bool = False
    """Refuse clients without a certificate from `ca_file` (mutual TLS)."""
    server_name: str | None = None
    """Name expected in a dialled peer's certificate when it is not the address that was dialled."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file must be set together")
        if self.client_auth and self.ca_file is None:
            raise ValueError("client_auth needs ca_file, the authority that clients' certificates come from")
        for path in (self.cert_file, self.key_file, self.ca_file):
            if path is not None and not path.is_file():
                raise ValueError(f"{path} is not a file")
        return self


class ServiceConfig(BaseSettings):
    """Settings of every service. Environment variables are `PACELINE_<FIELD>`, with `__` for nested fields."""

    model_config = SettingsConfigDict(
        extra="forbid", env_prefix="PACELINE_", env_nested_delimiter="__", use_attribute_docstrings=True
    )

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback it needs `tls` and a token, or `insecure`."""
    port: int = Field(default=0, ge=0, le=65535)
    """gRPC port; 0 picks a free one."""
    advertise_host: str | None = None
    """Host that peers should dial. Unset: `host`, or this machine's own address when `host` is a wildcard."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Prometheus port, on `host`; 0 picks a free one."""
    probe_port: int | None = Field(default=None, ge=0, le=65535)
    """Port, on `host`, that answers /livez and /readyz alone, in plain HTTP and without a token, for kubelets; 0
    picks a free one. Unset: none."""
    insecure: bool = False
    """Allow listening beyond loopback, and sending the token there, without TLS and token."""
    tls: TlsConfig | None = None
    """TLS of the gRPC and metrics ports and of calls to peers. Unset: plain text."""
    token: SecretStr | None = None
    """Bearer token that callers must send and that peers receive. Unset: none is required."""
    token_file: Path | None = None
    """File that holds the token; instead of `token`. Read again when it changes."""
    tokens_file: Path | None = None
    """YAML file of the hashed tokens of callers and their scopes, or a folder of such files, which end in .yaml and
    lie in it or one folder deeper; `paceline token` makes entries. Read again when they change. `token` is
    accepted as well, with all scopes."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """The store: redis://host:port/db, unix://path, redis+sentinel://host:port,host:port/name/db (the primary of
    that name), or redis+cluster://host:port,host:port; with rediss instead of redis: TLS."""
    namespace: str = Field(default="paceline", pattern=r"^[A-Za-z0-9_.-]+$")
    """Prefix of every key in the store; deployments that share a store need different ones."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log line that is written."""
    log_format: Literal["json", "console"] = "json"
    """One JSON object a line, or coloured text for people."""
    shutdown_grace_seconds: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """Seconds that running calls get to end after a request to stop."""
    max_message_bytes: int = Field(default=16 * 1024 * 1024, ge=4096)
    """Largest gRPC message, both ways."""
    max_concurrent_calls: int = Field(default=16384, ge=1)
    """Calls served at once, streams included and health not; of more, each is answered RESOURCE_EXHAUSTED with the
    time to wait."""
    max_parsed_bytes: int = Field(default=512 * 1024 * 1024, ge=1)
    """Memory for the requests that are worked on at once, counted before they are parsed: their bytes, 256 for each
    field and 16 for each token id. Large requests of more wait for up to 10 s and are then answered
    RESOURCE_EXHAUSTED with the time to wait."""
    max_connections: int = Field(default=8192, ge=1)
    """Connections to the gRPC port at once; of more, each is closed."""
    max_connection_age_seconds: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    """Age at which a caller is asked to connect again, which may lead to another replica. Unset: never."""
    max_connection_age_grace_seconds: float = Field(default=3600.0, ge=0, allow_inf_nan=False)
    """Seconds that calls in progress get to end on a connection of that age."""
    ready_file: Path | None = None
    """File that receives {pid, address, metrics_port} as JSON once the service is ready."""
    tracing_endpoint: str | None = Field(default=None, pattern=r"^(https?://)?[^/\s]+:\d+/?$")
    """OTLP/gRPC collector that spans are sent to, such as otel-collector:4317; TLS if it begins with https://.
    Unset: nothing is traced."""
    tracing_sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the traces begun here that are kept; the trace of a caller is kept if the caller keeps it."""
    _token_from_file: bool = PrivateAttr(False)

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, url: str) -> str:
        parse_store_url(url)
        return url

    @model_validator(mode="after")
    def _read_token(self) -> Self:
        if self.token_file is not None and self.token is None:
            if not self.token_file.is_file():
                raise ValueError(f"token_file: {self.token_file} is not a file")
            self.token = SecretStr(self.token_file.read_text().strip())
            self._token_from_file = True
        if self.token is not None and not self.token.get_secret_value():
            raise ValueError("token: must not be empty; leave it unset to ask for none")
        if self.tokens_file is not None and not (self.tokens_file.is_file() or self.tokens_file.is_dir()):
            raise ValueError(f"tokens_file: {self.tokens_file} is neither a file nor a folder")
        return self

    @property
    def rotating_token_file(self) -> Path | None:
        """File that the token was read from; None if it was set directly, or there is none."""
        return self.token_file if self._token_from_file else None


class LeaderConfig(ServiceConfig):
    """Settings of services of which one process leads while others stand by."""

    lease_seconds: float = Field(default=5.0, ge=0.5, allow_inf_nan=False)
    """A leader that is silent for so long is succeeded by a standby."""
    stall_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Seconds that a leader's event loop may be blocked until it no longer keeps its lease."""


def listening_problems(config: ServiceConfig) -> list[str]:
    """Return the reasons that forbid listening on `config.host`; empty if it is allowed."""
    problems = []
    if config.tls is not None and config.tls.cert_file is None:
        problems.append("tls.cert_file and tls.key_file are needed to serve with TLS")
    if not is_loopback(config.host) and not config.insecure:
        missing = [] if config.tls is not None else ["tls"]
        if config.token is None and config.tokens_file is None:
            missing.append("token")
        if missing:
            problems.append(
                f"listening on {config.host} needs {' and '.join(missing)}; "
                "set insecure to do without on a network that you trust"
            )
    return problems
