"""docs/security.md promises what a test shows: every row of its tables of promises names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.hostile.test_attacks import FINDINGS

TESTS = Path(__file__).parents[2]
PAGE = (TESTS.parent / "docs" / "security.md").read_text()
NAME = re.compile(r"`([\w/.]+\.py)::(\w+)(?:\[([^\]]+)\])?`")
HEAD = "| promise | test |"


def promises() -> list[tuple[str, str]]:
    """Return the rows of the tables of promises: what is promised, and what shows it."""
    rows, inside = [], False
    for line in PAGE.splitlines():
        inside = line == HEAD or (inside and line.startswith("|"))
        if inside and line != HEAD and not line.startswith("| ---"):
            promise, _, shown = line.strip("| ").rpartition(" | ")
            rows.append((promise, shown))
    return rows


@cache
def functions_of(path: str) -> set[str]:
    """Return the tests of a file."""
    tree = ast.parse((TESTS / path).read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {each.name for each in functions if each.name.startswith("test_")}


@pytest.mark.parametrize(("promise", "shown"), promises(), ids=lambda text: text[:40])
def test_a_promise_names_tests_that_exist(promise: str, shown: str) -> None:
    found = NAME.findall(shown)
    assert found, f"{promise}: {shown} names no test"
    assert not NAME.sub("", shown).strip(", "), f"{promise}: {shown} has something else than tests"
    for path, name, example in found:
        assert (TESTS / path).is_file(), path
        assert name in functions_of(path), f"{path} has no {name}"
        if example:
            assert example in FINDINGS, f"{path}::{name} has no example {example}"


def test_the_page_has_promises_then_threats_then_what_is_not_provided() -> None:
    headings = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert headings[-2:] == ["Threats", "Not provided"]
    assert HEAD not in PAGE[PAGE.index("## Threats") :]
    assert len(promises()) > 40
