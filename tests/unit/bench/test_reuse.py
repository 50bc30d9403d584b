"""What was reused of earlier rollouts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bench import history, lenience, reuse
from bench.lenience_table import by_level, level_table
from bench.scrape import Metrics
from bench.training import TrainedStep
from examples.tinymath.train import Options
from paceline import Exactness, Sample
from tests.unit.bench.steps import named, sample, step


def test_reuse_counts_prefixes_and_whole_samples() -> None:
    whole = sample(0, [1] * 10, cached_tokens=12, reused_prefix=10, decode_steps=1, drafted=10, accepted=9)
    part = sample(1, [1] * 30, cached_tokens=20, reused_prefix=10, decode_steps=21)
    fresh = sample(2, [1] * 10, decode_steps=10, lossless=False)
    found = reuse.reuse([named([whole, part]), named([fresh])])
    assert found["tokens"] == 50
    assert found["reused_share"] == 20 / 50
    assert found["cached_share"] == 32 / 50
    assert found["full_reuse_share"] == 1 / 2, "of those that had something to reuse"
    assert found["steps_per_token"] == 32 / 50
    assert found["acceptance_rate"] == 0.9
    assert not found["lossless"]


def test_without_anything_cached_nothing_is_reused() -> None:
    found = reuse.reuse([named([sample(0, [1, 2], decode_steps=2)])])
    assert (found["reused_share"], found["full_reuse_share"]) == (0.0, 0.0)


def test_rows_without_a_token_and_index_time_are_told() -> None:
    values = {
        reuse.VERIFIED_ROWS: 30.0,
        reuse.TAKEN_OVER: 20.0,
        f'{reuse.INDEX_SECONDS}{{phase="insert"}}': 0.04,
        f'{reuse.INDEX_SECONDS}{{phase="step"}}': 0.4,
    }
    replayed = step(sample(0, [1] * 40), metrics={"a": Metrics(values), "gateway": Metrics(values)})
    found = reuse.replayed([replayed])
    assert found["wasted_rows_per_token"] == 10 / 40
    assert found["build_share_of_rollout"] == 0.04 / 8
    assert found["follow_share_of_rollout"] == 0.4 / 8


def test_a_level_is_compared_with_plain_decoding_of_the_same_noise_after_the_first_epoch() -> None:
    options = Options(steps=4, prompts=2, pool=4)

    def run(*decode_steps: int) -> list[reuse.ReplayedStep]:
        return [step(sample(0, [1] * 10, decode_steps=n, reused_prefix=10 - n)) for n in decode_steps]

    runs = {
        "plain": run(10, 10, 10, 10),
        "plain, coupled noise": run(20, 20, 8, 8),
        "exact": run(10, 10, 5, 5),
        "coupled_history": run(20, 20, 2, 2),
    }
    table = history.figures(options, runs)
    assert table["exact"]["decode_steps_reduction"] == 0.5
    assert table["coupled_history"]["decode_steps_reduction"] == 0.75
    assert table["exact"]["reused_share_by_epoch"] == [0.0, 0.5]


def test_the_diversity_of_a_group_is_taken_over_its_samples() -> None:
    alike = [sample(slot, [1, 2, 3, 4, 5], "alike") for slot in range(2)]
    unlike = [sample(0, [1, 2, 3, 4, 5], "unlike"), sample(1, [6, 7, 8, 9, 10], "unlike")]
    assert sorted(lenience.diversities([named([*alike, *unlike])])) == [0.5, 1.0]


def _trained(*samples: Sample, kl: float = 0.0, reward: float = 0.0) -> TrainedStep:
    return TrainedStep(
        step=0,
        groups=(),
        samples=named(list(samples)),
        weights=Path("w"),
        rollout_seconds=2.0,
        update_seconds=1.0,
        push_seconds=1.0,
        reward=reward,
        kl=kl,
        update_kl=kl,
        clip_fraction=0.0,
        moved_kl=0.0,
    )


def test_a_cell_of_lenience_counts_the_epochs_in_which_there_was_something_to_reuse() -> None:
    fresh = _trained(sample(0, [1, 2, 3, 4], decode_steps=4), kl=9.0, reward=0.25)
    later = [
        _trained(
            sample(0, [1] * 10, decode_steps=n, reused_prefix=10 - n, cached_tokens=10), kl=k, reward=0.5
        )
        for n, k in ((4, 0.1), (6, 0.3))
    ]
    counted = Metrics({reuse.VERIFIED_ROWS: 15.0, reuse.TAKEN_OVER: 10.0})
    found = lenience.figures([fresh, fresh, *later], 2, counted)
    assert found["kl"] == pytest.approx(0.2)
    assert (found["steps_per_token"], found["saved_share"]) == (0.5, 0.5)
    assert (found["reused_share"], found["wasted_rows_per_token"]) == (0.5, 0.25)
    assert (found["reward"], found["reward_by_epoch"]) == (0.5, [0.25, 0.5])


def _cell(**changes: Any) -> dict[str, Any]:
    step = _trained(sample(0, [1, 2, 3, 4, 5], decode_steps=5))
    return {**lenience.figures([step, step], 1, Metrics()), "accuracy": 0.5, **changes}


def test_levels_are_compared_with_plain_of_the_same_seed() -> None:
    cells = {
        ("plain", 0): _cell(rollout_seconds=2.0),
        ("plain", 1): _cell(rollout_seconds=4.0),
        ("l = 1", 0): _cell(rollout_seconds=1.0, kl=0.1, lossless=False),
        ("l = 1", 1): _cell(rollout_seconds=1.0, kl=0.3, lossless=False),
        ("l = 1", 2): _cell(rollout_seconds=7.0, kl=0.2, lossless=False),
    }
    found = by_level(cells, "plain")
    assert found["l = 1"]["rollout_seconds_of_plain"] == {"mean": 0.375, "low": 0.25, "high": 0.5}
    assert found["l = 1"]["kl"] == {"mean": pytest.approx(0.2), "low": 0.1, "high": 0.3}
    assert (found["plain"]["lossless"], found["l = 1"]["lossless"]) == (True, False)
    assert found["l = 1"]["seeds"] == [0, 1, 2]
    alone = by_level({("l = 1", 2): cells["l = 1", 2]}, "plain")
    assert alone["l = 1"]["rollout_seconds_of_plain"] is None
    lines = level_table(found)
    assert len({line.count("|") for line in lines}) == 1
    assert "| 0.375 (0.25 to 0.5) |" in lines[3]


def test_settings_of_a_level_follow_from_cells_of_its_seed() -> None:
    cells = {
        ("plain", 0): _cell(diversity_median=0.4567),
        ("l = e^0.2", 0): _cell(kl=0.01),
        ("l = e^0.5", 0): _cell(kl=0.04),
    }
    target = lenience.settled(lenience.TARGET, Exactness.lenient(1.0), 0, cells)
    assert target.kl_target == pytest.approx(0.02)
    guarded = lenience.settled(lenience.GUARDED, Exactness.lenient(math.exp(0.8)), 0, cells)
    assert guarded.diversity_floor == 0.457
    assert lenience.settled("l = 1", Exactness.lenient(1.0), 5, {}) == Exactness.lenient(1.0)
    with pytest.raises(SystemExit, match=r"KL target needs the levels l = e\^0.2, l = e\^0.5"):
        lenience.settled(lenience.TARGET, Exactness.lenient(1.0), 1, cells)


def test_epochs_of_lenience_begin_with_a_step_and_more_than_one_is_needed() -> None:
    given = lenience.arguments([])
    assert lenience.options_of(given, 3).steps == 8
    assert history.epoch_steps(lenience.options_of(given, 3)) == 4
    for bad in (["--pool", "24"], ["--epochs", "1"]):
        with pytest.raises(SystemExit):
            lenience.arguments(bad)
