"""Check that the site's reference of the SDK has every public name with its members. A hook of MkDocs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocstrings import Inventory

import paceline
from deploy.blocking_client import INTERNAL


def on_post_build(config: MkDocsConfig) -> None:
    """Compare the inventory of anchors with the package. PluginError: names are missing."""
    with (Path(config.site_dir) / "objects.inv").open("rb") as inventory:
        found = Inventory.parse_sphinx(inventory)
    if missing := sorted(set(public_names()) - found.keys()):
        raise PluginError(f"docs/api.md lacks {', '.join(missing)}")


def public_names() -> Iterator[str]:
    """Yield the public names of the SDK, and `class.member` for fields, enum members, methods and properties."""
    for name in paceline.__all__:
        value = getattr(paceline, name)
        # The errors of calls have the members of their base.
        inherits = isinstance(value, type) and paceline.PacelineError in value.__bases__
        yield f"paceline.{name}"
        if isinstance(value, type) and not inherits:
            yield from (f"paceline.{name}.{member}" for member in members(value))


def members(kind: type[Any]) -> set[str]:
    """Return the names of the public members of a class, with the inherited ones."""
    found = {each.name for each in fields(kind)} if is_dataclass(kind) else set()
    if issubclass(kind, Enum):
        found |= set(kind.__members__)
    for owner in kind.__mro__:
        if owner.__module__.startswith("paceline."):
            found |= {
                name
                for name, each in vars(owner).items()
                if f"{owner.__name__}.{name}" not in INTERNAL
                and (inspect.isfunction(each) or isinstance(each, property | classmethod | staticmethod))
            }
            found |= set(getattr(owner, "__annotations__", ()))
    return {name for name in found - INTERNAL if not name.startswith("_")}
