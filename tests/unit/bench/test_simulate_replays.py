"""The cost of verification is fitted to published steps, and replays of published rollouts are off as stated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.simulate.replays import (
    ReplayedRollout,
    acceptance_for,
    lengths_with,
    off_by_kind,
    published_models,
    replayed,
    tables_of,
)
from bench.simulate.verification import (
    BUBBLESPEC,
    EFFICIENTROLLOUT,
    PUBLISHED,
    REPLAYS,
    DraftKind,
    Verification,
    fitted,
    of_step,
    replays_off,
    step_errors,
)
from services.simulator.device_tables import H100, QWEN3_8B, decoding_table

_SHEET = decoding_table("8B H100", QWEN3_8B, H100)


def test_a_table_with_an_overhead_waits_for_the_host_and_verifies_more_slowly() -> None:
    table = Verification(1.5, 2.0).on(_SHEET)
    plain, wide = _SHEET.seconds(8, 8, 8000), _SHEET.seconds(8, 40, 8000)
    assert table.seconds(8, 8, 8000) == pytest.approx(plain + 0.002)
    assert table.seconds(8, 40, 8000) == pytest.approx(1.5 * (wide + 0.002))
    assert table.seconds(8, 40, 8000, verifies=False) == pytest.approx(wide + 0.002)


def test_the_fit_finds_the_overhead_that_made_the_steps() -> None:
    true, made = Verification(1.5, 2.0), []
    for step in PUBLISHED:
        table = true.on(decoding_table(step.model, step.sizes, step.chip))
        alone, n = round(step.samples), round(step.drafting)
        plain = 1e3 * table.seconds(alone, alone, alone * step.context)
        verifying = 1e3 * table.seconds(n, round(n * (1 + step.drafts)), n * step.context)
        made.append(replace(step, plain=plain, verifying=verifying))
    found = fitted(made)
    assert (found.factor, found.host) == (pytest.approx(1.5), pytest.approx(2.0))
    assert step_errors(made) == pytest.approx([0.0] * len(made))


def test_a_factor_fits_published_steps_within_the_error_that_the_other_paper_has_for_them() -> None:
    stated, factor = max(map(abs, step_errors())), fitted().factor
    for step in PUBLISHED:
        assert abs(factor / of_step(step).factor - 1) < stated, step.model


def test_the_committed_figures_are_of_this_fit_and_of_all_published_rollouts() -> None:
    result = json.loads(REPLAYS.read_text())
    figures, table = result["figures"], result["tables"]["rollouts"]["rows"]
    assert figures["verification_factor"] == pytest.approx(fitted().factor)
    assert figures["host_ms"] == pytest.approx(fitted().host)
    assert figures["step_error"] == pytest.approx(max(map(abs, step_errors())))
    expected = [(m.paper, m.name, r.method) for m in published_models() for r in m.rollouts]
    assert [tuple(row[:3]) for row in table] == expected
    assert replays_off() == {kind: figures[f"{kind}_off"] for kind in DraftKind}


@pytest.mark.parametrize("paper", [BUBBLESPEC, EFFICIENTROLLOUT])
def test_a_replay_is_off_as_stated(paper: str) -> None:
    model = next(each for each in published_models() if each.paper == paper)
    short = replace(model, rollouts=model.rollouts[:1])
    (found,) = replayed(short, steps=1)
    # One step is a smaller sample of lengths than the published figures have; steps are off by as much at most.
    allowed = replays_off()[found.kind] + max(map(abs, step_errors()))
    assert abs(found.outside) <= allowed, found
    assert found.pessimistic < 0.9 * found.optimistic


def test_a_published_speed_is_off_by_its_distance_from_the_band() -> None:
    within = ReplayedRollout("p", "m", "a", DraftKind.LOOKUPS, 1.5, 1.2, 2.0)
    rows = [
        within,
        replace(within, kind=DraftKind.MODELS, published=0.9),
        replace(within, kind=DraftKind.MODELS, published=2.2),
        # Ends in the other order.
        replace(within, pessimistic=2.0, optimistic=1.2),
    ]
    assert [row.outside for row in rows] == pytest.approx([0.0, -0.25, 0.1, 0.0])
    assert off_by_kind(rows) == {"lookups_off": 0.0, "models_off": pytest.approx(0.25)}
    assert [row[-1] for row in tables_of(rows)["rollouts"]["rows"]] == ["within", "-25%", "+10%", "within"]


def test_without_figures_of_replays_nothing_is_assumed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="replays"):
        replays_off(tmp_path / "replays.json")


def test_lengths_and_acceptance_are_as_published() -> None:
    p = acceptance_for(0.3, 4)
    assert (p + p**2 + p**3 + p**4) / 4 == pytest.approx(0.3)
    lengths = lengths_with(6741, 39361, 49152, 64, 16)
    assert lengths.limit == 49152
    assert 0.4 < lengths.spread < 0.8
