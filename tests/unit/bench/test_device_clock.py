"""A recorded run on a device's clock: idle time decides what is generated ahead, and texts what that is worth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from bench.axes.policy import PolicySizes, SyntheticPolicy, hashes
from bench.axes.recorded import RunMissingError
from bench.device_clock.__main__ import clocked, rows_of
from bench.device_clock.cluster import ClockedStep, RecordedCluster, RecordedTexts, plain_seconds
from bench.known_texts import KnownText, TextInstance
from bench.rollout.modelled import DEVICES, H100_8B
from bench.rollout.registry import LONG_TAIL, SMOLLM2
from services.bubbles.config import BubblesConfig

DEVICE, VOCABULARY = DEVICES[H100_8B].steps, 8192
PROMPTS, SAMPLES, STEPS, LENGTH = 4, 2, 3, 160


def _texts(kl: float) -> list[RecordedTexts]:
    """Steps of the same prompts under a policy that moves by `kl` an update; samples differ in length."""
    policy, n = SyntheticPolicy(PolicySizes(VOCABULARY, 0.7, kl)), PROMPTS * SAMPLES
    prompts = hashes(1, count=PROMPTS).repeat(SAMPLES)
    found = []
    for step in range(STEPS):
        noise = hashes(2, step, count=n)
        now, before = policy.draw(
            np.tile(prompts, 2), np.tile(noise, 2), np.repeat([0, 1], n), LENGTH
        ).reshape(2, n, LENGTH)
        cells = [(place // SAMPLES, place % SAMPLES) for place in range(n)]
        lengths = [LENGTH // (1 + place % 3) for place in range(n)]
        found.append(
            RecordedTexts(
                step=step,
                prompt_ids=tuple(f"p{place}" for place in range(PROMPTS)),
                prompts=((5, 6, 7),) * PROMPTS,
                seeds={cell: step * n + place for place, cell in enumerate(cells)},
                responses={cell: now[place][: lengths[place]] for place, cell in enumerate(cells)},
                before={cell: before[place][: lengths[place]] for place, cell in enumerate(cells)}
                if step
                else {},
            )
        )
    return found


def _run(texts: list[RecordedTexts], update: float, bubbles: BubblesConfig | None) -> list[ClockedStep]:
    return list(RecordedCluster(DEVICE, VOCABULARY, 2, texts, update, bubbles).run())


def test_the_trainers_time_decides_how_much_is_generated_ahead() -> None:
    texts = _texts(kl=1e-6)
    plain = plain_seconds(texts[1], DEVICE, VOCABULARY, 2)
    nothing, little, all_of_it = (
        _run(texts, update, bubbles)
        for update, bubbles in ((plain, None), (0.2 * plain, BubblesConfig()), (9 * plain, BubblesConfig()))
    )
    assert [step.covered for step in nothing] == [0, 0, 0]
    assert [step.tokens for step in nothing] == [sum(map(len, each.responses.values())) for each in texts]
    assert all_of_it[0].covered == 0
    for place in (1, 2):
        assert 0 < little[place].covered < all_of_it[place].covered == nothing[place].tokens
        assert all_of_it[place].seconds < little[place].seconds < nothing[place].seconds
        assert all_of_it[place].tokens / all_of_it[place].decode_steps > 4
        assert all_of_it[place].most_decode_steps >= LENGTH / 17


def test_an_update_that_moves_the_policy_makes_drafts_worth_less() -> None:
    near, far = (_run(_texts(kl), 60.0, BubblesConfig())[2] for kl in (1e-6, 1e-2))
    assert near.covered == far.covered
    assert near.decode_steps < far.decode_steps


def test_a_run_on_the_clock_is_the_same_every_time() -> None:
    assert _run(_texts(1e-4), 0.3, BubblesConfig()) == _run(_texts(1e-4), 0.3, BubblesConfig())


def test_rows_leave_out_the_first_step() -> None:
    rows = list(rows_of(LONG_TAIL, _texts(1e-6), H100_8B, VOCABULARY))
    assert [len(row.steps) for row in rows] == [STEPS - 1] * 3
    assert [row.figures[1] for row in rows] == sorted(row.figures[1] or 0.0 for row in rows)
    assert rows[0].figures[4] == pytest.approx(1.0, abs=0.6)
    assert (rows[2].figures[4] or 0) > (rows[0].figures[4] or 0)


def test_a_sample_goes_on_where_it_was_left() -> None:
    text = KnownText("p", 1, np.arange(1, 41, dtype=np.int32))
    first = TextInstance(DEVICE, 64, 1000)
    first.begin("a", text)
    for _ in range(10):
        first.step()
    assert first.leave("a") == 10
    assert "a" not in first
    then = TextInstance(DEVICE, 64, 0)
    then.begin("a", KnownText("p", 1, text.response, begun=10))
    then.prefill(11)
    prefilled = then.step()
    assert prefilled.seconds >= DEVICE.seconds(1, 12, 11)
    while len(then):
        then.step()
    assert (then.counts.tokens, then.counts.steps) == (30, 30)


def test_without_a_recorded_run_the_command_that_records_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.device_clock.__main__.FOLDER", tmp_path)
    with pytest.raises(RunMissingError, match="make bench SUBJECT=smollm2"):
        next(clocked(SMOLLM2, H100_8B))
