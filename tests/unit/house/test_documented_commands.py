"""Commands in the documents name modules, benchmarks and targets of make that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_FOLDERS = ("docs", "kernels", "bench")
_DOCUMENTS = sorted(
    [*_ROOT.glob("*.md"), *(each for name in _FOLDERS for each in (_ROOT / name).rglob("*.md"))]
)
_OURS = re.compile(
    r"python3? -m ((?:bench|deploy|examples|kernels|services|paceline|tests)(?:\.\w+)*)\b(?!\.)"
)
_BENCHMARK = re.compile(r"\bNAME=([a-z_0-9]+)")
_MAKE = re.compile(r"`make ([a-z][a-z-]*)")


def _commands(pattern: re.Pattern[str], text: str) -> set[str]:
    return set(pattern.findall(text))


def _runs(module: str) -> bool:
    place = _ROOT / module.replace(".", "/")
    return place.with_suffix(".py").is_file() or (place / "__main__.py").is_file()


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda path: str(path.relative_to(_ROOT)))
def test_a_documented_command_exists(document: Path) -> None:
    text = document.read_text()
    modules = _commands(_OURS, text) | {f"bench.{name}" for name in _commands(_BENCHMARK, text)}
    targets = set(re.findall(r"^([a-z][a-z-]*):", (_ROOT / "Makefile").read_text(), re.MULTILINE))
    assert sorted(module for module in modules if not _runs(module)) == []
    assert sorted(_commands(_MAKE, text) - targets) == []
