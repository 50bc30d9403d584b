"""Replays of the papers: each table has one fitted cell at most, and the error is that of the others."""

from __future__ import annotations

import pytest

from bench.simulate import bubblespec, respec, rlhfspec
from bench.simulate.replay import ReplayedCell, acceptance_for, errors, lengths_with, solved


def test_the_error_is_that_of_predicted_cells() -> None:
    cells = [
        ReplayedCell("t", "a", "x", 10.0, 1.0, fitted=True),
        ReplayedCell("t", "b", "x", 10.0, 9.0),
        ReplayedCell("t", "c", "x", 10.0, 12.0),
        ReplayedCell("t", "d", "x", 10.0, 11.0),
    ]
    assert errors(cells) == {"median": pytest.approx(0.1), "largest": pytest.approx(0.2), "cells": 3.0}


def test_the_acceptance_gives_the_rate() -> None:
    p = acceptance_for(0.3, 4)
    assert (p + p**2 + p**3 + p**4) / 4 == pytest.approx(0.3)


def test_lengths_have_the_mean_and_the_longest_that_are_published() -> None:
    lengths = lengths_with(6741, 39361, 49152, 1024)
    assert lengths.limit == 49152
    assert 0.4 < lengths.spread < 0.8


def test_bisection_ends_at_the_nearer_end_where_nothing_fits() -> None:
    assert solved(5.0, lambda x: x, 0.0, 10.0, 30) == pytest.approx(5.0)
    assert solved(50.0, lambda x: x, 0.0, 10.0, 30) == pytest.approx(10.0)


def test_figure_5_is_fitted_by_one_sample_and_predicts_two_instances() -> None:
    cells = {(each.row, each.figure): each for each in rlhfspec.figure_5()}
    assert [each.row for each in cells.values() if each.fitted] == ["1 samples"]
    assert abs(cells["1 samples", "tokens/s"].error) < 0.01
    assert abs(cells["24 and 1 samples", "gain"].error) < 0.1


def test_by_the_published_throughput_the_plan_moves_what_the_paper_moves() -> None:
    moved, after = rlhfspec.replanned(rlhfspec.published_curve(), 19)
    assert moved == rlhfspec.MOVED
    assert after == pytest.approx(rlhfspec.AFTER)


def test_figure_7_slows_the_larger_batch_down() -> None:
    fitted, predicted = respec.figure_7()
    assert (fitted.fitted, predicted.fitted) == (True, False)
    assert predicted.simulated < 1 < fitted.simulated


def test_a_rollout_of_bubblespec_has_drafts_from_bubbles() -> None:
    found = bubblespec.rollout(bubblespec.MODELS[0], 0.003, True, steps=1)
    assert found.drafted == bubblespec.DRAFT_LENGTH
    assert found.draft > 0
    assert found.most_steps < 0.6 * bubblespec.MODELS[0].longest
