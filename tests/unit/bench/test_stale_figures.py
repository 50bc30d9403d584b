"""Figures expire: `make lint` fails until a table whose measured code has changed is renewed or marked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench import measured_code
from bench.measured_code import MeasuredCode, changed_share, measured_by, snapshot
from bench.nightly import __main__ as nightly
from bench.nightly.documents import publish
from bench.report import write

_ROOT = Path(__file__).parents[3]
_TABLE = "<!-- figures: x figures -->\n<!-- /figures -->\n"
Check = Callable[[], str]


def code(first: int, last: int) -> str:
    """Return a file with a docstring, a comment, an import, and the lines of these numbers."""
    lines = [f"    value_{number} = {number}" for number in range(first, last)]
    return "\n".join(['"""About."""', "import os", "", "# Why.", "if True:", *lines]) + "\n"


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Return lint's command, for a repository with a document that shows figures of 99 lines in code/a.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measured_code, "MEASURED", measured := {"x": MeasuredCode(("code",), 0.2)})
    monkeypatch.setattr(nightly, "MEASURED", measured)
    monkeypatch.setattr(nightly, "DOCUMENTS", (Path("README.md"),))
    Path("code/inner").mkdir(parents=True)
    Path("code/a.py").write_text(code(1, 99))
    Path("README.md").write_text(_TABLE)
    write("x", {"a": 1.5})
    publish("x")
    nightly.write_documents()

    def run() -> str:
        """Return what the command says; it exits with status 1 if that is not empty."""
        monkeypatch.setattr("sys.argv", ["bench.nightly", "--check"])
        with pytest.raises(SystemExit) as ended:
            nightly.main()
        assert ended.value.code is None or isinstance(ended.value.code, str)
        return ended.value.code or ""

    return run


def test_lint_runs_the_command() -> None:
    assert "-m bench.nightly --check\n" in (_ROOT / "Makefile").read_text().partition("\nlint:")[2]


def test_figures_of_unchanged_code_are_fresh(check: Check) -> None:
    assert check() == ""
    assert "older" not in Path("README.md").read_text()


def test_a_stale_figure_fails_until_it_is_marked_or_measured_anew(check: Check) -> None:
    Path("code/a.py").write_text(code(31, 129))
    said = check()
    for part in (
        "README.md: table `x figures` is stale",
        "30% of the lines of code have changed",
        "at most 20% may",
        "`make bench NAME=x`, then `python -m bench.nightly --publish x`",
        "mark it (`python -m bench.nightly --publish`)",
    ):
        assert part in said
    nightly.write_documents()
    assert "**older code: over 20 % of the lines have changed since**" in Path("README.md").read_text()
    assert check() == ""
    # Further changes move the mark in steps.
    Path("code/a.py").write_text(code(41, 139))
    assert check() == ""
    Path("code/a.py").write_text(code(61, 159))
    assert "is stale and not marked so: 61%" in check()
    write("x", {"a": 2.5})
    publish("x")
    assert "differs from bench/results/x.json" in check()
    nightly.write_documents()
    assert check() == ""
    assert "older" not in Path("README.md").read_text()


def test_moved_lines_documentation_and_imports_are_no_change(check: Check) -> None:
    Path("code/a.py").write_text(code(1, 50).replace("About", "Said otherwise").replace("# Why", "# Because"))
    Path("code/inner/b.py").write_text(code(50, 99).replace("import os", "from os import (\n    path,\n)"))
    assert check() == ""
    Path("code/a.py").rename("code/inner/c.py")
    assert check() == ""


def test_new_lines_count_as_well_as_lines_that_are_gone(check: Check) -> None:
    for last in (90, 120):
        Path("code/a.py").write_text(code(1, last))
        assert check() == ""
    for last in (70, 140):
        Path("code/a.py").write_text(code(1, last))
        assert "is stale" in check()


def test_code_that_is_not_known_is_said_to_be_so(check: Check) -> None:
    Path("code").rename("product")
    assert "bench/measured_code.py: code, which x measures, has no code" in check()
    assert snapshot("x") is None
    write("x", {"a": 1.5})
    publish("x")
    nightly.write_documents()
    assert "**unknown code**" in Path("README.md").read_text()
    assert measured_by("y") is None


def test_a_table_of_numbers_needs_a_result(check: Check) -> None:
    with Path("README.md").open("a") as document:
        document.write("\n| what | s |\n| --- | ---: |\n| step | 1.5 |\n")
    assert "README.md: no result is behind the table | what | s |" in check()


def test_the_share_of_much_code_is_estimated_from_a_sample(check: Check) -> None:
    Path("code/a.py").write_text(code(0, 10_000))
    before = snapshot("x")
    assert before is not None
    assert before["lines"] == 10_001
    assert len(before["sample"]) == 400 * 8
    assert changed_share("x", before) == 0
    Path("code/a.py").write_text(code(3_000, 13_000))
    assert changed_share("x", before) == pytest.approx(0.3, abs=0.06)
