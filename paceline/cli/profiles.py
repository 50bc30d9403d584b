"""Profiles: named connection options, in a file of the user's.

    [profiles.production]
    address = "gateway.example.com:7400"
    ca_file = "production/ca.crt"
    cert_file = "production/tls.crt"
    key_file = "production/tls.key"
    token_file = "production/token"

The file is ~/.config/paceline/config.toml, or what PACELINE_CONFIG names. Paths are relative to it.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

CONFIG, PROFILE = "PACELINE_CONFIG", "PACELINE_PROFILE"
_MOST_NAMED = 20


class ProfileError(ValueError):
    """Raised for a profile that cannot be used; the message names the file."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Options of a connection, each None where the profile leaves it out."""

    address: str | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None
    token_file: Path | None = None
    insecure: bool | None = None

    @classmethod
    def of(cls, values: dict[str, Any], folder: Path) -> Self:
        """Make a profile of a table of the file, which is in `folder`. ProfileError: a wrong name or type."""
        names = [field.name for field in fields(cls)]
        if unknown := sorted(values.keys() - set(names)):
            raise ProfileError(f"{unknown[0]!r} is no option; options are {', '.join(names)}")
        for name, value in values.items():
            wanted, allowed = (bool, "true or false") if name == "insecure" else (str, "text")
            if type(value) is not wanted:
                raise ProfileError(f"{name} is {value!r}; must be {allowed}")
        files = [name for name in values if name.endswith("_file")]
        return cls(**{**values, **{name: folder / Path(values[name]).expanduser() for name in files}})


def config_file() -> Path:
    """Return the path of the file with profiles. RuntimeError: this user has no home folder."""
    if named := os.environ.get(CONFIG):
        return Path(named)
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "paceline/config.toml"


def read_profile(name: str) -> Profile:
    """Return a profile. ProfileError: there is none of this name, or it cannot be read."""
    try:
        path = config_file()
        profiles = tomllib.loads(path.read_text()).get("profiles", {})
    except (OSError, RuntimeError, ValueError) as error:
        raise ProfileError(f"profiles cannot be read: {error}") from error
    found = profiles.get(name) if isinstance(profiles, dict) else None
    if not isinstance(found, dict):
        names = ", ".join(map(repr, list(profiles)[:_MOST_NAMED])) or "none"
        raise ProfileError(f"{path} has no profile {name!r}; profiles are {names}")
    try:
        return Profile.of(found, path.parent)
    except ProfileError as error:
        raise ProfileError(f"{path}: profile {name!r}: {error}") from error
