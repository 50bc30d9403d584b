"""Say on each page of the site of which version it is. A hook of MkDocs."""

from __future__ import annotations

import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the version of the package into the site's name."""
    version = tomllib.loads(PROJECT.read_text())["project"]["version"]
    config.site_name = f"{config.site_name} {version}"
    return config
