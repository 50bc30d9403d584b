"""Read the configuration of a service: flags over environment over file over defaults.

Every service has a subclass of `ServiceConfig`, whose fields are documented below them. An unknown key is an error
in every source, so a misspelled setting is never silently ignored. Errors name the setting and its source.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar
from urllib.parse import unquote, urlsplit

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    SettingsConfigDict,
    SettingsError,
)
from redis.asyncio.connection import SSLConnection, parse_url

from paceline.transport.channel import is_loopback

Port = Annotated[int, Field(ge=0, le=65535)]
"""Port of this machine; 0 lets the system choose a free one."""

SINGLE = ("redis", "rediss", "unix")
SENTINEL = ("redis+sentinel", "rediss+sentinel")
CLUSTER = ("redis+cluster", "rediss+cluster")
"""Schemes; those with a second s use TLS."""
_PORTS = {"sentinel": 26379, "cluster": 6379}
# Prefix of options in a Sentinel address that apply to the Sentinels instead of the server.
_FOR_SENTINELS = "sentinel_"
C = TypeVar("C", bound=BaseSettings)

USAGE_ERROR = 2
"""Exit status of a process that was started with a bad configuration."""

# Kubernetes puts the address of every Service of the namespace into the environment; a Service called
# paceline-gateway yields PACELINE_GATEWAY_SERVICE_HOST and similar variables, which are no settings.
_SERVICE_LINK = re.compile(r"_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Parsed address: `hosts` of Sentinels or cluster nodes, and `options` of connections to servers.

    For one server only `url` is set. `service` is the Sentinels' name of the primary, empty for a cluster.
    """

    url: str
    hosts: tuple[tuple[str, int], ...]
    service: str
    options: dict[str, Any]
    sentinel_options: dict[str, Any]


def parse_store_url(url: str) -> StoreAddress:
    """Parse `redis_url`; ValueError, without the password, if it is invalid."""
    scheme = url.partition("://")[0]
    if scheme not in (*SINGLE, *SENTINEL, *CLUSTER):
        known = ", ".join(f"{each}://" for each in (*SINGLE, *SENTINEL, *CLUSTER))
        raise ValueError(f"must start with one of {known}")
    if scheme in SINGLE:
        parse_url(url)
        return StoreAddress(url, (), "", {}, {})
    secure, kind = scheme.partition("+")[::2]
    parts = urlsplit(url)
    credentials, _, names = parts.netloc.rpartition("@")
    service, _, database = unquote(parts.path).strip("/").partition("/")
    if kind == "cluster" and (service or database):
        raise ValueError("a cluster has database 0 only, so nothing may follow the hosts")
    if kind == "sentinel" and not service:
        raise ValueError(
            "must name the primary behind the hosts: redis+sentinel://host:26379,host:26379/name"
        )
    hosts = tuple(_host(name, _PORTS[kind]) for name in names.split(","))
    # Without the hosts it is the address of one server, whose options Redis's own client parses.
    prefix = f"{credentials}@" if credentials else ""
    options = dict(parse_url(f"{secure}://{prefix}host/{database}?{parts.query}"))
    del options["host"]
    if options.pop("connection_class", None) is SSLConnection:
        options["ssl"] = True
    for_sentinels = {
        name.removeprefix(_FOR_SENTINELS): options.pop(name)
        for name in list(options)
        if name.startswith(_FOR_SENTINELS)
    }
    for_sentinels |= {name: value for name, value in options.items() if name.startswith("ssl")}
    return StoreAddress(url, hosts, service, options, for_sentinels)


def _host(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} is no host:port")
    return parts.hostname, parts.port or default_port


class TlsConfig(BaseModel):
    """Certificates, as PEM files, of this service as a server and as a client of its peers."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    cert_file: Path | None = None
    """Certificate chain of this process. Needed to serve, and to dial peers that require one."""
    key_file: Path | None = None
    """Private key of `cert_file`."""
    ca_file: Path | None = None
    """Authorities that peers' certificates must come from. Unset: the system's for servers, none for clients."""
    client_auth: bool = False
    """Refuse clients without a certificate from `ca_file` (mutual TLS)."""
    server_name: str | None = None
    """Name expected in a peer's certificate if it is not the dialled address."""

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
    port: Port = 0
    """gRPC port; 0 picks a free one."""
    advertise_host: str | None = None
    """Host that peers should dial. Unset: `host`, or this machine's own address when `host` is a wildcard."""
    metrics_port: Port = 0
    """Prometheus port, on `host`; 0 picks a free one."""
    probe_port: Port | None = None
    """Port, on `host`, that answers only /livez and /readyz, in plain HTTP and without a token, for kubelets; 0
    picks a free one. Unset: none."""
    insecure: bool = False
    """Allow listening beyond loopback, and sending the token there, without TLS and token."""
    tls: TlsConfig | None = None
    """TLS of the gRPC and metrics ports and of calls to peers. Unset: plain text."""
    token: SecretStr | None = None
    """Bearer token that callers must send and that peers receive. Unset: none is required."""
    token_file: Path | None = None
    """File with the token, instead of `token`. Read again when it changes."""
    tokens_file: Path | None = None
    """YAML file of the hashed tokens of callers and their scopes, or a folder of such files, which end in .yaml and
    are in it or one folder deeper; `paceline token` makes entries. Read again when they change. `token` is
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
    """Seconds that running calls get to finish after a request to stop."""
    max_message_bytes: int = Field(default=16 * 1024 * 1024, ge=4096)
    """Largest gRPC message, in both directions."""
    max_concurrent_calls: int = Field(default=16384, ge=1)
    """Calls served at once, streams included and health excluded; further ones are answered RESOURCE_EXHAUSTED with
    the time to wait."""
    max_parsed_bytes: int = Field(default=512 * 1024 * 1024, ge=1)
    """Memory for the requests in work at once, counted before they are parsed: their bytes, 256 for each field and
    16 for each token id. Large requests beyond it wait for up to 10 s and are then answered RESOURCE_EXHAUSTED with
    the time to wait."""
    max_connections: int = Field(default=8192, ge=1)
    """Connections to the gRPC port at once; further ones are closed."""
    max_connection_age_seconds: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    """Age at which a caller is asked to reconnect, which may lead to another replica. Unset: never."""
    max_connection_age_grace_seconds: float = Field(default=3600.0, ge=0, allow_inf_nan=False)
    """Seconds that running calls get to finish on a connection of that age."""
    ready_file: Path | None = None
    """File that receives {pid, address, metrics_port} as JSON once the service is ready."""
    tracing_endpoint: str | None = Field(default=None, pattern=r"^(https?://)?[^/\s]+:\d+/?$")
    """OTLP/gRPC collector that receives spans, such as otel-collector:4317; TLS if it begins with https://. Unset:
    nothing is traced."""
    tracing_sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the traces begun here that are kept; a caller's trace is kept if the caller keeps it."""
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
            raise ValueError("token: must not be empty; leave it unset to require none")
        if self.tokens_file is not None and not (self.tokens_file.is_file() or self.tokens_file.is_dir()):
            raise ValueError(f"tokens_file: {self.tokens_file} is neither a file nor a folder")
        return self

    @property
    def rotating_token_file(self) -> Path | None:
        """File that the token was read from; None if it was set directly, or there is none."""
        return self.token_file if self._token_from_file else None


class LeaderConfig(ServiceConfig):
    """Settings of services of which one process leads while the others are standbys."""

    lease_seconds: float = Field(default=5.0, ge=0.5, allow_inf_nan=False)
    """Seconds without a renewal after which a standby succeeds the leader."""
    stall_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Seconds for which a leader's event loop may be blocked before it gives up its lease."""


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


class ConfigError(Exception):
    """An invalid configuration; `problems` names each setting at fault."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(["bad configuration", *(f"  {problem}" for problem in self.problems)]))


class _FlagParser(argparse.ArgumentParser):
    """Argument parser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"{message} (from flags; --help lists them)"])


Source = tuple[str, dict[str, Any]]
"""Name of a source of settings, for error messages; and its settings."""


def load_config(cls: type[C], argv: Sequence[str] | None = None) -> C:
    """Return the configuration of this process: flags > environment > file (`--config`) > defaults.

    `argv` excludes the program name; None takes the process's. Bad configuration ends the process with
    status 2 and one message that names each setting at fault.
    """
    try:
        return read_config(cls, sys.argv[1:] if argv is None else argv, os.environ)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(USAGE_ERROR) from None


def read_config(cls: type[C], argv: Sequence[str], environ: Mapping[str, str]) -> C:
    """Return the configuration as `load_config` does, but raise ConfigError."""
    flags, path = _flags(cls, argv)
    sources = [flags, _environment(cls, environ)]
    if path is not None:
        sources.append(_file(path))
    merged: dict[str, Any] = {}
    for _, values in reversed(sources):
        merged = _merge(merged, values)
    try:
        return cls(**merged)
    except ValidationError as error:
        raise ConfigError(_problem(cls, each, sources) for each in error.errors()) from None


def _flags(cls: type[BaseSettings], argv: Sequence[str]) -> tuple[Source, Path | None]:
    own = _FlagParser(add_help=False, allow_abbrev=False)
    own.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
    parser = _FlagParser(parents=[own], allow_abbrev=False)
    source: CliSettingsSource[Any] = CliSettingsSource(
        cls,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
        root_parser=parser,
        case_sensitive=True,
    )
    try:
        path = own.parse_known_args(argv)[0].config
        values = source(args=list(argv))()
    except SettingsError as error:
        raise ConfigError([f"{error} (from flags)"]) from None
    values.pop("config", None)
    return ("flags", values), path


def _environment(cls: type[BaseSettings], environ: Mapping[str, str]) -> Source:
    prefix = str(cls.model_config["env_prefix"])
    known = {name.upper() for name in cls.model_fields}
    unknown = [
        name
        for name in environ
        if name.upper().startswith(prefix)
        and name.upper()[len(prefix) :].split("__")[0] not in known
        and not _SERVICE_LINK.search(name)
    ]
    if unknown:
        where = f"no such setting of {cls.__name__} (from the environment)"
        raise ConfigError(f"{name}: {where}" for name in unknown)
    try:
        return "environment", EnvSettingsSource(cls)()
    except SettingsError as error:
        raise ConfigError([f"{error} (from the environment)"]) from None


def _file(path: Path) -> Source:
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError([f"--config {path}: {error}"]) from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError([f"--config {path}: must hold settings by name, not a {type(values).__name__}"])
    return str(path), values


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _problem(cls: type[BaseSettings], error: ErrorDetails, sources: Sequence[Source]) -> str:
    path = [str(part) for part in error["loc"]]
    origin = next((f" (from {name})" for name, values in sources if _holds(values, path)), "")
    if error["type"] == "extra_forbidden":
        return f"{'.'.join(path)}: no such setting of {cls.__name__}{origin}"
    # A secret must not end up on a terminal or in a log, so its value is not repeated.
    shown = "" if not path or path[0] == "token" else f", not {error['input']!r}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        shown = ""
    return f"{'.'.join(path) + ': ' if path else ''}{message}{shown}{origin}"


def _holds(values: Any, path: Sequence[str]) -> bool:
    for part in path:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return bool(path)
