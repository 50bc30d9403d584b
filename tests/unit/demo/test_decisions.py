"""The decisions of a run in its report."""

from __future__ import annotations

from pathlib import Path

from examples.tinymath.decisions import decision_rows, load_decisions, save_decisions
from examples.tinymath.records import summarize
from examples.tinymath.report import write_report
from paceline import Decision
from tests.unit.demo.test_report import record

STEP = Decision(
    107.25,
    "speculation",
    "step 0: 3 of 9 engine steps verified drafts; <no> draft would have paid in 6",
    0.125,
    {"step": 0.0, "drafts": {"suffix": [3.0, 24.0, 12.0]}},
    "run",
)
CAP = Decision(101.0, "draft_cap", "step 0: cap 4 -> 8 tokens", 0.0, {"from": 4})


def test_they_are_listed_in_order_with_what_became_of_the_drafts() -> None:
    first, second = decision_rows([STEP, CAP], 100.0)
    assert first == {
        "time": "1.0",
        "kind": "draft cap",
        "gain": "",
        "reason": "step 0: cap 4 -> 8 tokens",
        "drafts": "",
    }
    assert (second["time"], second["gain"], second["drafts"]) == ("7.2", "+12%", "suffix 12/24")


def test_of_very_many_the_first_are_shown() -> None:
    assert len(decision_rows([CAP] * 5000, 0.0)) == 400


def test_they_are_kept_and_read_again(tmp_path: Path) -> None:
    save_decisions(tmp_path / "decisions.json", [STEP, CAP])
    assert load_decisions(tmp_path / "decisions.json") == [STEP, CAP]
    assert load_decisions(tmp_path / "none.json") == []


def test_the_report_has_them_and_does_without(tmp_path: Path) -> None:
    about = {"name": "r", "started": "now", "model": "m", "instances": 2, "device": "cpu"}
    summary = {**about, "start_seconds": 1.0, "wall_seconds": 9.0}
    summary |= summarize([record(0)], {"prompts": 1, "samples": 3, "pool": 5})
    write_report(tmp_path / "r.html", [record(0)], summary)
    assert "<h2>Decisions</h2>" not in (tmp_path / "r.html").read_text()
    write_report(tmp_path / "r.html", [record(0)], summary, [STEP])
    page = (tmp_path / "r.html").read_text()
    assert "&lt;no&gt; draft would have paid in 6" in page
    assert "suffix 12/24" in page
