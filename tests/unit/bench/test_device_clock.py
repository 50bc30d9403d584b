"""A recorded run on a device's clock: idle time decides what is generated ahead, and texts what that is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

pytest.importorskip("numba")

from bench.axes.known_texts import KnownText, TextInstance
from bench.axes.policy import PolicySizes, SyntheticPolicy, hashes
from bench.device_clock.cluster import RecordedCluster
from bench.device_clock.recording import (
    ClockedStep,
    ForkedText,
    RecordedTexts,
    Tokens,
    TrainerClock,
    scheduled,
)
from bench.device_clock.rows import (
    COLOCATED,
    COUPLED,
    ONE_STEP_OFF,
    OTHER_NOISE,
    PACELINE,
    PACELINE_ROWS,
    PLAIN,
    PLAIN_ONE_STEP_OFF,
    STOCK_ROWS,
    VLLM_ONE_STEP_OFF,
    ClockedRegime,
    best_vllm,
    count_rows,
    rows_of,
)
from bench.device_clock.stock import NgramMethod, StockFleet, SuffixMethod, method_of
from bench.rollout.modelled import DEVICES, H100_8B
from bench.rollout.registry import ARCTIC, LONG_TAIL
from services.bubbles.config import BubblesConfig

BAND, VOCABULARY = DEVICES[H100_8B], 8192
DEVICE = BAND.steps
PROMPTS, SAMPLES, STEPS, LENGTH = 4, 2, 3, 160
SLEEP = BubblesConfig(during_update="sleep")


@cache
def _texts(kl: float, *, other_noise: bool = False, length: int = LENGTH) -> tuple[RecordedTexts, ...]:
    """Steps of the same prompts under a policy that moves by `kl` an update; prompts differ in length."""
    policy, n = SyntheticPolicy(PolicySizes(VOCABULARY, 0.7, kl)), PROMPTS * SAMPLES
    prompts = hashes(1, count=PROMPTS).repeat(SAMPLES)
    found = []
    for step in range(STEPS):
        noise = hashes(2, step, count=n)
        ahead = hashes(3, step, count=n) if other_noise else noise
        now, before = policy.draw(
            np.tile(prompts, 2), np.concatenate([noise, ahead]), np.repeat([0, 1], n), length
        ).reshape(2, n, length)
        cells = [(place // SAMPLES, place % SAMPLES) for place in range(n)]
        lengths = [length // (1 + place // SAMPLES) for place in range(n)]
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
    return tuple(found)


def _run(
    texts: Sequence[RecordedTexts],
    update: float,
    bubbles: BubblesConfig | None,
    *,
    one_step_off: bool = False,
) -> list[ClockedStep]:
    trainer = TrainerClock(update, one_step_off)
    return list(RecordedCluster(DEVICE, VOCABULARY, 2, texts, trainer, bubbles).run())


def _plain(texts: Sequence[RecordedTexts]) -> list[ClockedStep]:
    return list(map(StockFleet.of(DEVICE, VOCABULARY, 2).rolled_out, texts))


def test_the_trainers_time_decides_how_much_is_generated_ahead() -> None:
    texts = _texts(kl=1e-6)
    plain = _plain(texts)[1].seconds
    nothing, little, all_of_it = (
        _run(texts, update, bubbles)
        for update, bubbles in ((plain, None), (0.2 * plain, BubblesConfig()), (9 * plain, BubblesConfig()))
    )
    assert [step.covered for step in nothing] == [0, 0, 0]
    assert [step.tokens for step in nothing] == [sum(map(len, each.responses.values())) for each in texts]
    assert all_of_it[0].covered == 0
    for place in (1, 2):
        assert 0 < (little[place].covered or 0) < (all_of_it[place].covered or 0) == nothing[place].tokens
        assert all_of_it[place].seconds < little[place].seconds < nothing[place].seconds
        assert all_of_it[place].tokens / all_of_it[place].decode_steps > 4
        assert all_of_it[place].most_decode_steps >= LENGTH / 17
    for steps, update in ((nothing, plain), (little, 0.2 * plain), (all_of_it, 9 * plain)):
        assert [step.whole - step.seconds for step in steps] == pytest.approx([update] * STEPS)


def test_a_trainer_that_needs_the_devices_leaves_the_steps_own_bubbles() -> None:
    texts = _texts(kl=1e-6)
    update = 9 * _plain(texts)[1].seconds
    asleep, longer, awake = (
        _run(texts, seconds, bubbles)
        for seconds, bubbles in ((update, SLEEP), (2 * update, SLEEP), (update, BubblesConfig()))
    )
    assert [step.covered for step in asleep] == [step.covered for step in longer]
    for place in (1, 2):
        assert 0 < (asleep[place].covered or 0) < (awake[place].covered or 0)


def test_one_step_off_a_rollout_waits_for_the_update_before_the_last() -> None:
    assert [TrainerClock(3.0).next_begin(10.0), TrainerClock(3.0, one_step_off=True).next_begin(10.0)] == [
        13,
        10,
    ]
    trainer = TrainerClock(15.0, one_step_off=True)
    # The updates end at 25, 40 and 55.
    assert [trainer.next_begin(ended) for ended in (10.0, 20.0, 35.0)] == [10, 25, 40]
    steps = _plain(_texts(1e-6))
    assert [step.whole for step in scheduled(steps, TrainerClock(0.0))] == [step.seconds for step in steps]


def test_one_step_off_there_is_no_update_to_generate_ahead_in() -> None:
    texts = _texts(kl=1e-6)
    update = 0.3 * _plain(texts)[1].seconds
    waiting, ahead = (_run(texts, update, BubblesConfig(), one_step_off=off) for off in (False, True))
    assert 0 < (ahead[1].covered or 0) < (waiting[1].covered or 0)
    assert ahead[0].whole == ahead[0].seconds
    assert waiting[0].whole == pytest.approx(waiting[0].seconds + update)


def test_drafts_are_worth_less_after_a_large_update_and_least_to_other_noise() -> None:
    near, far, other = (
        _run(texts[:2], 60.0, BubblesConfig())[1]
        for texts in (_texts(1e-6), _texts(1e-2), _texts(1e-6, other_noise=True))
    )
    assert near.covered == far.covered == other.covered
    assert near.decode_steps < far.decode_steps < other.decode_steps
    assert 3 * near.decode_steps < other.decode_steps


def test_a_run_on_the_clock_is_the_same_every_time() -> None:
    texts = _texts(1e-6, length=60)
    assert _run(texts, 0.1, BubblesConfig()) == _run(texts, 0.1, BubblesConfig())


def _lookup(text: Tokens, least: int, longest: int, limit: int, most: int) -> Tokens:
    """Return what follows the first occurrence of the longest n-gram that ends the text."""
    known = text.tolist()
    for n in range(longest, least - 1, -1):
        for at in range(len(known) - n):
            if known[at : at + n] == known[-n:]:
                return text[at + n : at + n + most]
    return text[:0]


def test_rows_are_of_all_systems_and_leave_out_the_first_step() -> None:
    regime = ClockedRegime(LONG_TAIL, _texts(1e-6, length=60), _texts(1e-6, other_noise=True, length=60))
    methods = {
        row.name: lambda row=row: method_of(row.speculation or {}, ARCTIC, _lookup)
        for row in STOCK_ROWS
        if row.speculation is not None and row.speculation["method"] == "ngram"
    }
    rows = {row.system: row for row in rows_of(regime, BAND, VOCABULARY, methods)}
    assert len(rows) == count_rows(regime, methods) == 3 + 3 + len(PACELINE_ROWS)
    assert {len(row.steps) for row in rows.values()} == {STEPS - 1}
    assert rows[PLAIN].speedup == rows[PLAIN].tokens_per_step == 1
    assert rows[PLAIN].step_speedup == pytest.approx(1.0)
    # A quarter of a training step is the update.
    assert rows[PLAIN_ONE_STEP_OFF].step_speedup == pytest.approx(4 / 3)
    assert rows[PLAIN].low_speedup == 1, "plain engines do not wait for the host"
    # A sample's own step takes 3 ms longer and, with drafts, a third longer than that.
    assert all(0.4 < row.low_speedup / row.speedup < 0.9 for name, row in rows.items() if "plain" not in name)
    assert {name for name, row in rows.items() if row.versions_behind} == {
        PLAIN_ONE_STEP_OFF,
        VLLM_ONE_STEP_OFF,
        ONE_STEP_OFF,
    }
    assert {name for name, row in rows.items() if row.step_speedup is None} == {
        row.name for row in PACELINE_ROWS if row.whole_step
    }
    assert rows["paceline, nothing ahead"].figures[1] == 0
    assert rows[PLAIN].figures[1] is None
    assert 0 < (rows[COLOCATED].figures[1] or 0) <= (rows[PACELINE].figures[1] or 0)
    assert rows[COUPLED].seconds < rows[OTHER_NOISE].seconds
    best = best_vllm(rows.values(), LONG_TAIL)
    assert best is not None
    assert best.seconds == min(rows[name].seconds for name in methods) == rows[VLLM_ONE_STEP_OFF].seconds
    known = {name: row.steps[:1] + row.steps for name, row in rows.items()}
    fewer, measured = replace(regime, other_noise=None), replace(BAND, pessimistic=DEVICE)
    found = list(rows_of(fewer, measured, VOCABULARY, {}, lambda name, _: known[name]))
    assert all(row.speedup == row.low_speedup for row in found), "a measured device has no band"
    without = [row.system for row in found]
    assert len(without) == count_rows(fewer, {})
    assert not {OTHER_NOISE, VLLM_ONE_STEP_OFF} & set(without)


class KnownMethod:
    """Proposes the whole rest of a text, and keeps the tokens that it is given."""

    def __init__(self, texts: Sequence[RecordedTexts]) -> None:
        self._texts = {
            f"{each.step}/{prompt}/{slot}": response.tolist()
            for each in texts
            for (prompt, slot), response in each.responses.items()
        }
        self.given: dict[str, list[int]] = {}
        self.open = set[str]()

    def begin(self, sample_id: str, prompt: Tokens) -> None:
        self.open.add(sample_id)
        self.given[sample_id] = []

    def extend(self, sample_id: str, tokens: Sequence[int]) -> None:
        self.given[sample_id] += tokens

    def propose(self, sample_id: str, prompt: Sequence[int], response: Sequence[int]) -> Sequence[int]:
        assert response == self.given[sample_id]
        return self._texts[sample_id][len(response) :]

    def end(self, sample_id: str) -> None:
        self.open.remove(sample_id)


def test_a_stock_engine_verifies_all_that_its_method_finds() -> None:
    texts = _texts(kl=1e-6)
    methods = list[KnownMethod]()

    def made() -> KnownMethod:
        methods.append(KnownMethod(texts))
        return methods[-1]

    fleet = StockFleet.of(DEVICE, VOCABULARY, 2, made, window=7)
    plain, drafted = _plain(texts), list(map(fleet.rolled_out, texts))
    for each, step, slow in zip(texts, drafted, plain, strict=True):
        # The first token comes alone, and then each step gives seven accepted ones and another.
        expected = [1 + -(-(len(response) - 1) // 8) for response in each.responses.values()]
        assert (step.decode_steps, step.most_decode_steps) == (sum(expected), max(expected))
        assert step.drafted == step.accepted == step.tokens - step.decode_steps
        assert step.covered is None
        assert step.tokens == slow.tokens == slow.decode_steps
        assert step.seconds < slow.seconds / 3
    # Every token reached the method once, and prompts stay with their engine.
    for each in texts:
        for (prompt, slot), response in each.responses.items():
            name = f"{each.step}/{prompt}/{slot}"
            homes = [name in method.given for method in methods]
            assert homes == [place == prompt % 2 for place in range(2)]
            assert methods[prompt % 2].given[name] == response.tolist()
    assert not any(method.open for method in methods)


def test_n_grams_are_looked_up_in_prompt_and_response() -> None:
    method = NgramMethod(3, (2, 4), _lookup)
    assert method.propose("", [1, 2, 3, 4, 5], [9, 2, 3]) == [4, 5, 9]
    assert method.propose("", [1, 2, 3], [9, 3]) == []


@pytest.mark.skipif(not (ARCTIC / "arctic_inference").is_dir(), reason="scripts/arctic has not been run")
def test_suffix_decoding_drafts_from_earlier_samples() -> None:
    method = SuffixMethod(24, ARCTIC)
    known = list(range(50, 90))
    method.begin("a", np.array([1, 2, 3], np.int32))
    method.extend("a", known)
    method.end("a")
    method.begin("b", np.array([1, 2, 3], np.int32))
    method.extend("b", known[:12])
    # As many tokens as matched, at most.
    assert method.propose("b", [1, 2, 3], known[:12]) == known[12:24]
    assert method.propose("b", [1, 2, 3], [7, 8]) == []


def test_a_sample_that_leaves_its_text_at_a_near_tie_goes_on_along_the_fork() -> None:
    texts = list(_texts(kl=1e-6))
    last = texts[-1]
    # The policy before had another token at one place, where the two nearly tied.
    changed, forks = {}, {}
    for cell, response in last.responses.items():
        other = response.copy()
        other[20:] = (other[20:] + 1) % VOCABULARY
        changed[cell], forks[cell] = other, [ForkedText(20, 0.01, response)]
    texts[-1] = replace(last, before=changed, forks=forks)
    plain = _plain([last])[0].seconds
    without, with_forks = (
        list(
            RecordedCluster(
                DEVICE, VOCABULARY, 2, texts, TrainerClock(9 * plain), BubblesConfig(), most
            ).run()
        )[-1]
        for most in (0, 4)
    )
    assert with_forks.covered == without.covered
    assert with_forks.decode_steps < without.decode_steps / 2


def test_a_step_that_reads_a_prompt_does_not_verify_drafts() -> None:
    table = BAND.pessimistic
    instance = TextInstance(table, 64, 0)
    instance.begin("a", KnownText("p", 1, np.arange(1, 5, dtype=np.int32)))
    instance.prefill(11)
    assert instance.step().seconds == table.seconds(1, 12, 1, verifies=False) < table.seconds(1, 12, 1)


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
