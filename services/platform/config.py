"""Configuration of a service: flags over environment over file over defaults.

Every service has a subclass of `ServiceConfig` whose fields carry their documentation below them. A key
that no field has is an error wherever it stands, so that a misspelled setting is never silently ignored.
"""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.platform.config_sources import ConfigError as ConfigError
from services.platform.config_sources import load_config as load_config

REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
"""The kinds of address a store can have: TCP, TCP with TLS, unix socket."""


class TlsConfig(BaseModel):
    """Certificates, as PEM files, of this service as a server and as a client of its peers."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    cert_file: Path | None = None
    """Certificate chain that this process shows. Needed to serve, and to dial peers that ask for one."""
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
    """What every service can be told. Environment variables are `PACELINE_<FIELD>`, nested ones `__`."""

    model_config = SettingsConfigDict(
        extra="forbid",
        env_prefix="PACELINE_",
        env_nested_delimiter="__",
        use_attribute_docstrings=True,
    )

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback it needs `tls` and a token, or `insecure`."""
    port: int = Field(default=0, ge=0, le=65535)
    """gRPC port; 0 picks a free one."""
    advertise_host: str | None = None
    """Host that peers should dial. Unset: `host`, or this machine's own address when `host` is a wildcard."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Prometheus port, on `host`; 0 picks a free one."""
    insecure: bool = False
    """Allow listening beyond loopback, and sending the token there, without TLS and token."""
    tls: TlsConfig | None = None
    """TLS of the gRPC and metrics ports and of calls to peers. Unset: plain text."""
    token: SecretStr | None = None
    """Bearer token that callers must show and that peers are shown. Unset: none is asked for."""
    token_file: Path | None = None
    """File that holds the token; instead of `token`. Read again when it changes."""
    tokens_file: Path | None = None
    """YAML file of the tokens of callers, as hashes, with what each may do; `paceline token` makes entries. Read
    again when it changes. `token` is accepted besides, for everything."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """The store: redis://, rediss:// (TLS) or unix:// address."""
    namespace: str = Field(default="paceline", pattern=r"^[A-Za-z0-9_.-]+$")
    """Prefix of every key in the store; deployments that share a store need different ones."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log line that is written."""
    log_format: Literal["json", "console"] = "json"
    """One JSON object a line, or coloured text for people."""
    shutdown_grace_seconds: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """Time that running calls get to end after a request to stop."""
    max_message_bytes: int = Field(default=16 * 1024 * 1024, ge=4096)
    """Largest gRPC message, both ways."""
    ready_file: Path | None = None
    """Where to write {pid, address, metrics_port} as JSON once the service is ready."""
    tracing_endpoint: str | None = Field(default=None, pattern=r"^(https?://)?[^/\s]+:\d+/?$")
    """OTLP/gRPC collector that spans are sent to, such as otel-collector:4317; TLS if it begins with https://.
    Unset: nothing is traced."""
    tracing_sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the traces begun here that are kept; a caller's own trace is kept if the caller keeps it."""
    _token_from_file: bool = PrivateAttr(False)

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, url: str) -> str:
        if not url.startswith(REDIS_SCHEMES):
            raise ValueError(f"must start with one of {', '.join(REDIS_SCHEMES)}")
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
        if self.tokens_file is not None and not self.tokens_file.is_file():
            raise ValueError(f"tokens_file: {self.tokens_file} is not a file")
        return self

    @property
    def rotating_token_file(self) -> Path | None:
        """The file that the token came from; None when it was given itself, or there is none."""
        return self.token_file if self._token_from_file else None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on `host`."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def listening_problems(config: ServiceConfig) -> list[str]:
    """What forbids listening on `config.host`; empty when nothing does."""
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
