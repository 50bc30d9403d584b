"""`paceline policy`: assignments on the command line, and decisions in a line."""

from __future__ import annotations

import pytest
import typer

from paceline.cli.policy import decision_line, with_changes
from paceline.types import Decision


def test_assignments_change_what_they_name_and_leave_the_rest() -> None:
    before = {"mode": "fixed", "ladder": {"on": True, "patience": 3}}
    after = with_changes(
        before, ["mode=toggle", "speculation=false", "ladder.patience=", "ladder.lengths=[1,2]", "margin=0.1"]
    )
    assert after == {
        "mode": "toggle",
        "speculation": False,
        "margin": 0.1,
        "ladder": {"on": True, "lengths": [1, 2]},
    }
    assert before["ladder"] == {"on": True, "patience": 3}


@pytest.mark.parametrize("assignment", ["mode", "=3", "ladder..on=true", "mode.on=true"])
def test_what_is_no_assignment_is_refused(assignment: str) -> None:
    with pytest.raises(typer.BadParameter):
        with_changes({"mode": "fixed"}, [assignment])


def test_a_decision_is_one_line() -> None:
    line = decision_line(Decision(0.0, "toggle", "on at 3 samples", 0.25, {}, "run"))
    assert line.endswith("run toggle +25%: on at 3 samples")
    assert "fleet knobs: " in decision_line(Decision(0.0, "knobs", "mode", 0.0, {}))
