"""Addresses of the store: one Redis server, the primary that Sentinels name, or a Redis Cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio.connection import SSLConnection, parse_url

SINGLE = ("redis", "rediss", "unix")
SENTINEL = ("redis+sentinel", "rediss+sentinel")
CLUSTER = ("redis+cluster", "rediss+cluster")
"""Schemes; those with a second s use TLS."""
_PORTS = {"sentinel": 26379, "cluster": 6379}
# Options of a Sentinel address that are meant for the Sentinels and not for the server.
_FOR_SENTINELS = "sentinel_"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Parsed address: `hosts` of Sentinels or cluster nodes, and `options` of connections to servers.

    For one server `url` has everything, and the rest is empty. `service` is the name by which Sentinels know the
    primary; it is empty for a cluster.
    """

    url: str
    hosts: tuple[tuple[str, int], ...]
    service: str
    options: dict[str, Any]
    sentinel_options: dict[str, Any]


def parse_store_url(url: str) -> StoreAddress:
    """Parse `redis_url`. ValueError, without the password, if it is none that the store can have."""
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
    # What is left is an address of one server, whose options are read as Redis's own client does.
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
