"""`paceline drafter show`: the state of the drafter in words."""

from __future__ import annotations

from dataclasses import replace

from paceline.cli.policy import drafter_lines
from paceline.types import Drafter

TOLD = Drafter(
    drafter_version=3,
    published_at=1.0,
    path="/weights/drafter/3",
    updates=9,
    samples_used=400,
    policy_version=12,
    acceptance_length=2.125,
    candidate_acceptance_length=2.5,
    rejected_candidates=4,
    rollbacks=1,
)


def test_it_shows_the_version_its_acceptance_and_the_training() -> None:
    lines = drafter_lines(TOLD).splitlines()
    assert lines[0].startswith("drafter version 3 of ")
    assert lines[0].endswith(", from /weights/drafter/3")
    assert lines[1] == "2.12 tokens a verification on held-out samples, the latest candidate 2.50"
    assert lines[2] == "learned from 400 samples in 9 updates, last of policy version 12"
    assert lines[3] == "4 candidates rejected, 1 roll-backs"


def test_it_shows_nothing_of_a_version_never_compared_or_published() -> None:
    assert "verification" not in drafter_lines(replace(TOLD, acceptance_length=0.0))
    assert drafter_lines(replace(TOLD, drafter_version=0)).startswith(
        "no drafter is published yet\nlearned from 400"
    )
