"""The synthetic policy has the numbers that it is asked for, and known texts are decoded whole."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from bench.axes.__main__ import AXES, PROMPTS, SAMPLES, Point, rows_of, shown, synthetic
from bench.axes.known_texts import KnownText, decode, plain_seconds, stored
from bench.axes.policy import PolicySizes, SyntheticPolicy, hashes
from bench.axes.recorded import steps_of
from bench.rollout.modelled import DEVICES, H100_8B
from bench.rollout.record import RunMissingError
from bench.rollout.registry import SUBJECTS, Subject
from examples.tinymath.options import Options

DEVICE = DEVICES[H100_8B].steps
CONTEXTS = 4000


def _logprobs(policy: SyntheticPolicy, age: int) -> np.ndarray:
    """Log-probabilities in many contexts, [contexts, candidates]."""
    ages = np.full(CONTEXTS, age)
    return policy.conditions(hashes(5, count=CONTEXTS), ages, 7, np.arange(CONTEXTS) % 64).logprobs


@pytest.mark.parametrize("entropy", [0.2, 0.7, 1.4])
def test_entropy_is_as_asked(entropy: float) -> None:
    logs = _logprobs(SyntheticPolicy(PolicySizes(8192, entropy, 1e-4)), 0)
    assert -(np.exp(logs) * logs).sum(1).mean() == pytest.approx(entropy, rel=0.1)


@pytest.mark.parametrize("age", [1, 4])
def test_a_policy_drifts_by_the_kl_of_an_update_for_each(age: int) -> None:
    policy = SyntheticPolicy(PolicySizes(8192, 0.7, 1e-3))
    then, now = _logprobs(policy, age), _logprobs(policy, 0)
    assert (np.exp(then) * (then - now)).sum(1).mean() == pytest.approx(age * 1e-3, rel=0.15)


def test_a_higher_temperature_raises_the_entropy_and_lowers_the_kl() -> None:
    entropies, divergences = [], []
    for temperature in (0.8, 1.0, 1.3):
        policy = SyntheticPolicy(PolicySizes(8192, 0.7, 1e-3, temperature=temperature))
        now, then = _logprobs(policy, 0), _logprobs(policy, 1)
        entropies.append(-(np.exp(now) * now).sum(1).mean())
        divergences.append((np.exp(then) * (then - now)).sum(1).mean())
    assert entropies == sorted(entropies)
    assert entropies[1] == pytest.approx(0.7, rel=0.1)
    assert divergences == sorted(divergences, reverse=True)


def test_the_same_noise_gives_the_same_text_until_the_policies_differ() -> None:
    policy = SyntheticPolicy(PolicySizes(8192, 0.7, 1e-4))
    prompts, seeds = hashes(1, count=4), hashes(2, count=4)
    now, same, before, other = (
        policy.draw(prompts, noise, np.full(4, age), 200)
        for noise, age in ((seeds, 0), (seeds, 0), (seeds, 1), (hashes(3, count=4), 0))
    )
    assert (now == same).all()
    assert (now == before).mean() > 0.6 > (now == other).mean()
    assert 0 <= now.min() <= now.max() < 8192


def test_what_no_policy_has_is_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        SyntheticPolicy(PolicySizes(1000, 0.7, 1e-4))
    with pytest.raises(ValueError, match="entropy"):
        SyntheticPolicy(PolicySizes(64, 4.0, 1e-4))


def test_a_text_with_nothing_to_draft_from_takes_a_step_a_token() -> None:
    text = KnownText("p", 1, np.arange(1, 101, dtype=np.int32))
    found = decode([text], [], DEVICE, 1024)
    assert (found.counts.tokens, found.counts.steps, found.counts.drafted) == (100, 100, 0)
    # A step reads the prompt of one token and what was decoded.
    assert found.seconds == pytest.approx(plain_seconds([text], DEVICE))


def test_what_is_known_saves_steps() -> None:
    text = KnownText("p", 1, np.arange(1, 201, dtype=np.int32))
    known = decode([replace(text, reference=text.response)], [], DEVICE, 1024)
    assert known.counts.tokens == 200
    assert known.counts.steps < 40
    assert known.counts.accepted == 200 - known.counts.steps
    assert known.seconds < plain_seconds([text], DEVICE) / 3
    before = [stored("p", 0, 9, text.response, 0)]
    assert decode([text], before, DEVICE, 1024).counts.steps < 60
    assert decode([replace(text, prompt_id="q")], before, DEVICE, 1024).counts.steps == 200


def test_an_axis_goes_through_the_base() -> None:
    assert all(getattr(Point(), name) in values for name, values in AXES.items())
    small = Point(length=40)
    rows = {row["drafts"]: row["tokens_per_step"] for row in rows_of("length", "40", small)}
    assert list(rows) == ["history", "ahead", "ahead, other noise"]
    assert rows["ahead"] > rows["ahead, other noise"] >= 1.0
    assert rows["ahead"] > rows["history"] >= 1.0
    first = next(rows_of("length", "40", small))
    assert first["speedup_vs_plain_low"] < first["speedup_vs_plain"]
    assert shown(first)[-1].endswith(f" to {first['speedup_vs_plain']:.3g})")
    assert PROMPTS * SAMPLES == 8
    assert [row["changed"] for row in synthetic([])] == ["base"] * 4
    _, ahead, _, epoch = rows_of("lag", "1", replace(small, lag=1))
    assert {**epoch, "drafts": "ahead"} == ahead, "an epoch of one update is the update before"
    *_, late = rows_of("lag", "1000", replace(small, lag=1000))
    assert late["drafts"] == "epoch"
    assert late["tokens_per_step"] < epoch["tokens_per_step"]


def _recorded(folder: Path, subject: Subject) -> None:
    """Keep a run of two steps, the second of which says what the first said."""
    place = folder / subject.name
    (place / "steps").mkdir(parents=True)
    (place / "made_of.json").write_text(json.dumps({"options": asdict(subject.options), "model": ""}))
    for step in range(2):
        data = {
            "step": step,
            **dict.fromkeys(("rollout_seconds", "update_seconds", "push_seconds", "clip_fraction"), 0.0),
            "reward": 0.25 * step,
            "moved_kl": 1e-4,
            "groups": [["p", [1, 2]]],
            "samples": [["p", 0, 10 + step, list(range(3, 63)), [-0.5] * 60]],
            "weights_after": [f"v{step}", ""],
        }
        (place / f"steps/000{step}.json").write_text(json.dumps(data))


def test_a_recorded_run_is_decoded_with_the_steps_before(tmp_path: Path) -> None:
    subject = replace(SUBJECTS["tinymath"], options=Options(steps=2, prompts=1, samples=1))
    with pytest.raises(RunMissingError, match="make bench SUBJECT=tinymath"):
        list(steps_of(subject, tmp_path))
    _recorded(tmp_path, subject)
    first, second = steps_of(subject, tmp_path)
    assert list(first.values()) == [0, 60, 60, 0.0, 1e-4, None, None, None]
    assert (second["reward"], second["tokens_mean"]) == (0.25, 60)
    assert second["tokens_per_step"] > 2, "the same text was sampled one step before"
    assert second["speedup_vs_plain"] > 1
