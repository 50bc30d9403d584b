"""Token of a local platform: what it is, and the files in which its callers find it.

Every process of the platform asks for it, so that other users of this machine can neither read samples nor change
weights. It is new at every start, as the embedded Redis is, unless the environment or the caller gives one: whoever
took the port of a platform that has ended, and was shown its token there, can do nothing with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline.found_token import TOKEN, TOKEN_FILE, token_file_of, token_of_environment
from paceline.private_files import private_folder, write_private
from paceline.tokens import new_token
from services.local.child import PlatformError
from services.local.config import PlatformConfig

NAME = "token"
"""Name of the file in the platform's folder."""


def with_token(config: PlatformConfig, environment: Mapping[str, str]) -> PlatformConfig:
    """Return the configuration with the token that its processes ask for.

    PlatformError: there is to be none, but one is given; or the file that is named has none.
    """
    given = [name for name in (TOKEN, TOKEN_FILE) if environment.get(name)]
    if config.no_token:
        if config.token or given:
            raise PlatformError(f"no_token: {'token' if config.token else given[0]} is given, too; unset one")
        return config
    if config.token:
        return config
    # Callers are told to name this platform's own file, which is not there yet, or is that of the last one.
    if (
        given == [TOKEN_FILE]
        and Path(environment[TOKEN_FILE]).absolute() == (config.folder / NAME).absolute()
    ):
        return replace(config, token=new_token())
    try:
        return replace(config, token=token_of_environment(environment) or new_token())
    except ValueError as error:
        raise PlatformError(str(error)) from error


class TokenFiles:
    """Files with the token of one platform, each for this user alone, from its start to its end."""

    def __init__(self, folder: Path, token: str | None) -> None:
        self.path = folder / NAME
        """The one in the platform's folder, for Prometheus and for clients over HTTP; empty without a token."""
        self._token = token or ""
        self._written: list[Path] = []

    def write(self) -> None:
        """Write the file in the platform's folder."""
        self._write(self.path)

    def announce(self, ports: Iterable[int]) -> None:
        """Write the files in which clients look that call these ports.

        Where this user has no home folder to write to, clients have to be told.
        """
        if not self._token:
            return
        for port in ports:
            with suppress(OSError, RuntimeError):
                path = token_file_of(port)
                if path not in self._written:
                    private_folder(path.parent)
                    self._write(path)

    def remove(self) -> None:
        """Remove what was written and is still this platform's."""
        for path in self._written:
            with suppress(OSError):
                if path.read_text().strip() == self._token:
                    path.unlink()
        self._written.clear()

    def _write(self, path: Path) -> None:
        write_private(path, f"{self._token}\n" if self._token else "")
        self._written.append(path)
