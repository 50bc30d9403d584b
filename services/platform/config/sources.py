"""Sources of a configuration: flags, environment and file, and errors that name the setting and its source."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliSettingsSource, EnvSettingsSource, SettingsError

C = TypeVar("C", bound=BaseSettings)

USAGE_ERROR = 2
"""Exit status of a process that was started with a bad configuration."""

# Kubernetes puts the address of every Service of the namespace into the environment; a Service called
# paceline-gateway yields PACELINE_GATEWAY_SERVICE_HOST and its like, which are nobody's settings.
_SERVICE_LINK = re.compile(r"_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")


class ConfigError(Exception):
    """An invalid configuration; `problems` names each setting at fault."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(["bad configuration", *(f"  {problem}" for problem in self.problems)]))


class _FlagParser(argparse.ArgumentParser):
    """Argument parser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"{message} (from flags; --help lists them)"])


@dataclass(frozen=True, slots=True)
class _Source:
    """Settings from one source, with its name for error messages."""

    name: str
    values: dict[str, Any]


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
    for source in reversed(sources):
        merged = _merge(merged, source.values)
    try:
        return cls(**merged)
    except ValidationError as error:
        raise ConfigError(_problem(cls, each, sources) for each in error.errors()) from None


def _flags(cls: type[BaseSettings], argv: Sequence[str]) -> tuple[_Source, Path | None]:
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
    return _Source("flags", values), path


def _environment(cls: type[BaseSettings], environ: Mapping[str, str]) -> _Source:
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
        return _Source("environment", EnvSettingsSource(cls)())
    except SettingsError as error:
        raise ConfigError([f"{error} (from the environment)"]) from None


def _file(path: Path) -> _Source:
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError([f"--config {path}: {error}"]) from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError([f"--config {path}: must hold settings by name, not a {type(values).__name__}"])
    return _Source(str(path), values)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _problem(cls: type[BaseSettings], error: ErrorDetails, sources: Sequence[_Source]) -> str:
    path = [str(part) for part in error["loc"]]
    origin = next((f" (from {source.name})" for source in sources if _holds(source.values, path)), "")
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
