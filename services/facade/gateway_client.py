"""Client of the gateway with the current token and certificates of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paceline import AsyncClient, RetryPolicy
from paceline.address import parse_addresses
from paceline.channel import Tls
from services.facade.config import FacadeConfig
from services.platform.config.sources import ConfigError
from services.platform.security.certificates import Certificates, watch_certificates
from services.platform.security.guard import own_token

_MOST_CLIENTS = 8
"""Clients that live at once. The oldest ends, with its calls, when there would be more."""


class GatewayClient:
    """The SDK's client, made anew when token or certificates have changed.

    One that was replaced lives on, for the streams that are still on it, until several others have come.
    """

    def __init__(self, config: FacadeConfig) -> None:
        """Read token and certificates.

        ConfigError if an address cannot be meant, or the token would travel in plain text; OSError or Unreadable if
        the files cannot be used.
        """
        self._config = config
        self._token = own_token(config)
        self._certificates: Callable[[], Certificates | None] = lambda: None
        if config.tls is not None:
            self._certificates = watch_certificates(config.tls).current
        try:
            addresses = parse_addresses(config.gateway, tls=config.tls is not None)
        except ValueError as error:
            raise ConfigError([f"gateway: {error}"]) from error
        if config.tls is None and self._token() is not None and not config.insecure:
            for address in addresses:
                if not address.loopback:
                    raise ConfigError(
                        [f"will not send the token to {address.target} in plain text; set tls, or insecure"]
                    )
        self._made: list[tuple[tuple[str | None, Certificates | None], AsyncClient]] = []
        self._closing: set[asyncio.Task[None]] = set()

    def current(self) -> AsyncClient:
        """Return the client; call it on the event loop."""
        key = (self._token(), self._certificates())
        if not self._made or self._made[-1][0] != key:
            self._made.append((key, self._make(key[0])))
            while len(self._made) > _MOST_CLIENTS:
                _, oldest = self._made.pop(0)
                closing = asyncio.create_task(oldest.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        return self._made[-1][1]

    async def close(self) -> None:
        """End all calls and connections."""
        for _, client in self._made:
            await client.close()
        await asyncio.gather(*self._closing)

    def _make(self, token: str | None) -> AsyncClient:
        config, tls = self._config, self._config.tls
        files = None if tls is None else Tls(tls.ca_file, tls.cert_file, tls.key_file, tls.server_name)
        return AsyncClient(
            config.gateway,
            token=token or "",
            tls=files,
            retry=RetryPolicy(seconds=config.retry_seconds),
            insecure=config.insecure,
        )
