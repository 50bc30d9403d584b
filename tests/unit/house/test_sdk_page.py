"""The reference of the SDK has every public name."""

from __future__ import annotations

import re
from pathlib import Path

import paceline
from paceline import errors

PAGE = Path(__file__).parents[3] / "docs/sdk.md"


def test_every_public_name_is_in_the_reference() -> None:
    shown = set(re.findall(r"^::: paceline\.(\w+)$", PAGE.read_text(), re.MULTILINE))
    assert "errors" in shown, "the page of all its classes"
    missing = {name for name in paceline.__all__ if not hasattr(errors, name)} - shown
    assert missing == set()


def test_the_reference_of_the_errors_lists_their_public_classes() -> None:
    section = re.search(r"^::: paceline\.errors\n((?: +.*\n)+)", PAGE.read_text(), re.MULTILINE)
    assert section
    listed = re.findall(r"^ +- (\w+)$", section[1], re.MULTILINE)
    assert sorted(listed) == sorted(name for name in paceline.__all__ if hasattr(errors, name))
