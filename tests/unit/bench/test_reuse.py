"""What was reused of earlier rollouts."""

from __future__ import annotations

from bench import reuse
from bench.drafts import history
from bench.scrape import Metrics
from examples.tinymath.train import Options
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
