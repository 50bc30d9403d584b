"""The reference of the SDK has every public name, and every member of one has a text."""

from __future__ import annotations

import inspect
import re
import zlib
from functools import cache
from pathlib import Path

import griffe
import pytest
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

import paceline
from deploy.site.sdk_reference import members, on_post_build, public_names

DOCS = Path(__file__).parents[3] / "docs"
CLASSES = [name for name in paceline.__all__ if isinstance(getattr(paceline, name), type)]


@cache
def read(path: Path, module: str) -> griffe.Module:
    """Return a module as the site reads it, without importing it."""
    return griffe.visit(module, path, path.read_text())


def test_the_reference_has_the_public_names() -> None:
    shown = re.findall(r"^::: paceline\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(paceline.__all__)


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_and_member_says_what_it_is(name: str) -> None:
    kind = getattr(paceline, name)
    owners = [
        read(Path(inspect.getfile(each)), each.__module__)[each.__name__]
        for each in kind.__mro__
        if each.__module__.startswith("paceline.")
    ]
    assert owners[0].docstring
    for member in members(kind):
        texts = [each[member].docstring for each in owners if member in each.members]
        assert any(texts), f"{name}.{member}"


def test_a_site_without_a_name_is_not_built(tmp_path: Path) -> None:
    assert {"paceline.SamplingParams.top_p", "paceline.ExactnessLevel.EXACT"} < {*public_names()}
    head = b"# Sphinx inventory version 2\n# Project: x\n# Version: 0\n# zlib\n"
    (tmp_path / "objects.inv").write_bytes(head + zlib.compress(b""))
    config = MkDocsConfig()
    config.site_dir = str(tmp_path)
    with pytest.raises(PluginError, match=r"lacks paceline\.AbortedError, .*paceline\.SamplingParams\.top_p"):
        on_post_build(config)


def test_the_guide_is_short() -> None:
    text = re.sub(r"```.*?```", "", (DOCS / "sdk.md").read_text(), flags=re.DOTALL)
    assert len(text.split()) <= 3000
