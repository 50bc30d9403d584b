"""A recorded run on a device's clock: idle time decides what is generated ahead, and texts what that is worth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from bench.axes.known_texts import KnownText, TextInstance
from bench.axes.policy import PolicySizes, SyntheticPolicy, hashes
from bench.device_clock.__main__ import clocked, rows_of
from bench.device_clock.cluster import ClockedStep, RecordedCluster, RecordedTexts, plain_seconds
from bench.device_clock.old_texts import ForkedText, written
from bench.rollout.modelled import DEVICES, H100_8B
from bench.rollout.record import RunMissingError
from bench.rollout.registry import LONG_TAIL, SMOLLM2
from bench.rollout.training import TrainedStep
from examples.tinymath.options import Options
from paceline import Group, SampleKey
from services.bubbles.config import BubblesConfig
from services.generation.engine.types import Ending, EngineRequest, Finish, SampleStep
from tests.unit.bench.steps import sample, trained

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
    assert [len(row.steps) for row in rows] == [STEPS - 1] * 5
    nothing, idle, _, everything, forked = [row.figures for row in rows]
    assert nothing[1] == 0
    assert (idle[1] or 0) < (everything[1] or 0) == forked[1]
    assert nothing[4] == pytest.approx(1.0, abs=0.6)
    assert (everything[4] or 0) > (nothing[4] or 0)


def test_a_sample_that_leaves_its_text_at_a_near_tie_goes_on_along_the_fork() -> None:
    texts = _texts(kl=1e-6)
    last = texts[-1]
    # The policy before had another token at one place, where the two nearly tied.
    changed, forks = {}, {}
    for cell, response in last.responses.items():
        other = response.copy()
        other[20:] = (other[20:] + 1) % VOCABULARY
        changed[cell], forks[cell] = other, [ForkedText(20, 0.01, response)]
    texts[-1] = replace(last, before=changed, forks=forks)
    plain = plain_seconds(last, DEVICE, VOCABULARY, 2)
    without, with_forks = (
        list(RecordedCluster(DEVICE, VOCABULARY, 2, texts, 9 * plain, BubblesConfig(), most).run())[-1]
        for most in (0, 4)
    )
    assert with_forks.covered == without.covered
    assert with_forks.decode_steps < without.decode_steps / 2
    # In no time there is no fork.
    assert list(RecordedCluster(DEVICE, VOCABULARY, 2, texts, 0.0, None, 4).run())[-1].covered == 0


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


class TextEngine:
    """Draws 100 * seed + position; the runner-up is one more, and the margin is least at position 5."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._waiting: list[EngineRequest] = []
        self.loaded: list[int] = []

    def add(self, request: EngineRequest) -> None:
        self._waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def finished_by_prefix(self, request: EngineRequest) -> Ending | None:
        return Ending(Finish.LENGTH) if len(request.prefix) >= self._length else None

    def step(self) -> list[SampleStep]:
        request = self._waiting.pop()
        positions = range(len(request.prefix), self._length)
        tokens = [100 * request.seed + each for each in positions]
        told = (
            {
                "top_token_ids": [each + 1 for each in tokens],
                "top_logprobs": [abs(each - 5) + 0.1 for each in positions],
            }
            if request.near_ties
            else {}
        )
        return [SampleStep(request.sample_id, tokens, [-1.0] * len(tokens), Finish.LENGTH, **told)]

    def apply_weights(self, tensors: Iterable[Any]) -> None:
        self.loaded.append(len(list(tensors)))


def _trained(step: int, slots: int) -> TrainedStep:
    samples = [replace(sample(slot, [1, 2], "p"), seed=10 + slot) for slot in range(slots)]
    return trained(step, [Group("p", [7, 8], slots)], samples)


def test_old_texts_have_the_runner_up_at_their_nearest_ties() -> None:
    found = written(TextEngine(9), _trained(1, 2), Options(max_tokens=9))  # type: ignore[arg-type]
    text = found[SampleKey("p", 1)]
    assert text.response.tolist() == [1100 + each for each in range(9)]
    assert [(fork.at, round(fork.margin, 1)) for fork in text.forks] == [
        (5, 0.1),
        (4, 1.1),
        (6, 1.1),
        (3, 2.1),
    ]
    for fork in text.forks:
        assert fork.response[: fork.at].tolist() == text.response[: fork.at].tolist()
        assert fork.response[fork.at] == text.response[fork.at] + 1
        assert fork.response[fork.at + 1 :].tolist() == text.response[fork.at + 1 :].tolist()


def test_without_a_recorded_run_the_command_that_records_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.device_clock.__main__.FOLDER", tmp_path)
    with pytest.raises(RunMissingError, match="make bench SUBJECT=smollm2"):
        next(clocked(SMOLLM2, H100_8B))
