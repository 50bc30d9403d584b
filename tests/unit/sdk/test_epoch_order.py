"""Prompts that come in the order of the epoch before are forecast, others are not, and wrong forecasts are few."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

import hypothesis.strategies as st
import pytest
from hypothesis import given

from paceline import BatchHint, Group, SampleRequest, SamplingParams
from paceline.prompts import MOST_NEEDED, EpochOrder, EpochOrders

Step = Sequence[str]
SAMPLING, OTHER = SamplingParams(max_tokens=8), SamplingParams(max_tokens=9)
SEED = 7


def asked(prompt_id: str, step: int, slot: int = 0, **fields: object) -> SampleRequest:
    given = {"run_id": "run", "sampling": SAMPLING, "run_seed": SEED, **fields}
    tokens = [int(prompt_id) + 1] * 3
    return SampleRequest(prompt_id=prompt_id, prompt_token_ids=tokens, step=step, slot=slot, **given)  # type: ignore[arg-type]


@dataclass
class Trainer:
    """Asks for `samples` of each prompt of a step; remembers which prompts were forecast for which step."""

    order: EpochOrder = field(default_factory=lambda: EpochOrder(1 << 16, 1 << 20))
    samples: int = 1
    step: int = 0
    stride: int = 1
    hints: dict[int, BatchHint] = field(default_factory=dict)

    def go_through(self, steps: Iterable[Step]) -> None:
        for prompts in steps:
            for slot in range(self.samples):
                for prompt_id in prompts:
                    hint = self.order.ask(asked(prompt_id, self.step, slot))
                    if hint is not None:
                        assert hint.step not in self.hints, "once a step"
                        self.hints[hint.step] = hint
            self.step += self.stride

    def forecast(self) -> dict[int, set[str]]:
        return {step: {group.prompt_id for group in hint.groups} for step, hint in self.hints.items()}


def names(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def cut(prompts: Sequence[str], size: int) -> list[Step]:
    return [prompts[first : first + size] for first in range(0, len(prompts), size)]


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    samples=st.integers(1, 3),
    stride=st.integers(1, 3),
    luck=st.randoms(use_true_random=False),
)
def test_an_order_that_comes_again_is_forecast_from_the_second_epoch_on(
    sizes: list[int], samples: int, stride: int, luck: random.Random
) -> None:
    prompts = iter(names(sum(sizes)))
    epoch = [list(islice(prompts, size)) for size in sizes]
    trainer = Trainer(samples=samples, stride=stride)
    for _ in range(3):
        for step in epoch:
            # Requests that are sent at once arrive in any order.
            luck.shuffle(step)
            trainer.go_through([step])
    # The first step that is known again forms the first forecast, which has to come true before one is given out.
    first = len(sizes) + 2
    want = {number * stride: set(epoch[number % len(sizes)]) for number in range(first, 3 * len(sizes) + 1)}
    assert trainer.forecast() == want
    for hint in trainer.hints.values():
        assert {group.samples for group in hint.groups} == {samples}
        assert (hint.run_id, hint.run_seed, hint.sampling) == ("run", SEED, SAMPLING)
        assert [list(group.prompt_token_ids) for group in hint.groups] == [
            [int(group.prompt_id) + 1] * 3 for group in hint.groups
        ]
    assert trainer.order.missed == 0


@pytest.mark.parametrize("luck", range(10))
def test_prompts_that_are_shuffled_for_each_epoch_are_not_forecast(luck: int) -> None:
    shuffled, prompts, trainer = random.Random(luck), names(128), Trainer()
    for _ in range(8):
        shuffled.shuffle(prompts)
        trainer.go_through(cut(prompts, 8))
    assert trainer.hints == {}


def test_prompts_that_never_come_again_are_not_forecast() -> None:
    trainer = Trainer()
    trainer.go_through(cut(names(100), 4))
    assert trainer.hints == {}


def test_of_steps_that_are_cut_elsewhere_in_each_epoch_most_is_forecast() -> None:
    """A trainer that cycles through prompts without regard to epochs: 20 prompts, 6 a step."""
    trainer = Trainer()
    steps = cut(list(islice(cycle(names(20)), 300)), 6)
    trainer.go_through(steps)
    shares = [
        len(prompts & set(steps[step])) / len(prompts)
        for step, prompts in trainer.forecast().items()
        if step < len(steps)
    ]
    assert len(shares) > len(steps) // 2
    assert min(shares) >= 0.5


@given(steps=st.lists(st.lists(st.sampled_from(names(6)), min_size=1, max_size=4, unique=True), max_size=120))
def test_at_most_every_second_step_is_forecast_wrongly(steps: list[list[str]]) -> None:
    trainer = Trainer()
    for step in steps:
        trainer.go_through([step])
        # One must come true before each that is given out.
        assert 2 * trainer.order.missed <= trainer.step
    assert trainer.order.missed <= len(trainer.hints)


def test_after_each_miss_twice_as_many_forecasts_must_come_true() -> None:
    trainer, epoch = Trainer(), cut(names(500), 1)
    trainer.go_through(epoch)
    known, fresh = iter(epoch), iter(cut(names(1000)[500:], 1))

    def wait() -> int:
        """Go on with the epoch until something is forecast; return how many steps came before."""
        forecasts = len(trainer.hints)
        for waited, step in enumerate(known):
            trainer.go_through([step])
            if len(trainer.hints) > forecasts:
                return waited
        raise AssertionError("nothing was forecast")

    waits = []
    for _ in range(9):
        waits.append(wait())
        trainer.go_through([next(fresh)])
    # The first known step forms a forecast; then so many must come true.
    assert waits == [min(2**misses, MOST_NEEDED) for misses in range(9)]
    trainer.go_through([next(fresh)])
    assert trainer.order.missed == 9
    # Each one that was given out and comes true halves that.
    trainer.go_through(islice(known, MOST_NEEDED + 1 + 4))
    trainer.go_through([next(fresh)])
    assert wait() == MOST_NEEDED // 2**4 * 2


@given(
    steps=st.lists(st.lists(st.sampled_from(names(40)), min_size=1, max_size=12), max_size=40),
    runs=st.lists(st.sampled_from("abc"), min_size=1, max_size=5),
    most=st.integers(1, 30),
)
def test_memory_is_bounded_over_all_runs(steps: list[list[str]], runs: list[str], most: int) -> None:
    orders = EpochOrders(most, most_tokens=2 * most)
    for step, (prompts, run_id) in enumerate(zip(steps, cycle(runs), strict=False)):
        for prompt_id in prompts:
            hint = orders.ask(asked(prompt_id, step, run_id=run_id))
            assert hint is None or len(hint.groups) <= most
            held = list(orders._runs.values())
            assert sum(order.entries for order in held) == orders._entries <= most
            assert sum(order.tokens for order in held) == orders._tokens <= 2 * most
            for order in held:
                in_steps = [*order._over, *([order._now] if order._now else [])]
                assert order.entries == sum(len(each.samples) for each in in_steps)
                assert order.tokens == sum(len(each.token_ids) for each in order._prompts.values())


def test_an_epoch_that_is_too_large_is_not_forecast() -> None:
    large, fits = Trainer(EpochOrder(59, 1 << 20)), Trainer(EpochOrder(66, 1 << 20))
    for trainer in (large, fits):
        for _ in range(3):
            trainer.go_through(cut(names(60), 3))
    assert large.hints == {}
    assert fits.hints


def test_the_least_recently_active_runs_are_dropped() -> None:
    orders = EpochOrders(1000)
    for number in range(100):
        orders.ask(asked("1", 0, run_id=str(number)))
    assert list(orders._runs) == names(100)[36:]


def test_announced_steps_are_not_forecast() -> None:
    orders, found = EpochOrders(1000), []
    for step, prompts in enumerate(cut(names(6), 2) * 4):
        if step in (5, 6, 7):
            orders.announced("run", step + 1)
        found += [hint for each in prompts if (hint := orders.ask(asked(each, step))) is not None]
    assert [hint.step for hint in found] == [5, 9, 10, 11, 12]


def test_samples_whose_seeds_cannot_be_known_are_not_forecast() -> None:
    trainer = Trainer()
    trainer.go_through(cut(names(6), 2) * 2)
    assert list(trainer.hints) == [5, 6]
    for prompt_id, seed in (("0", 1), ("1", 2)):
        # Half of what is expected has come with the first one.
        trainer.order.ask(asked("5" if seed == 1 else prompt_id, trainer.step, run_seed=seed))
        assert trainer.order.ask(asked(prompt_id, trainer.step, run_seed=seed + 1)) is None


def test_resumed_samples_and_evaluations_do_not_count() -> None:
    trainer = Trainer()
    for step in cut(names(6), 2) * 2:
        trainer.go_through([step])
        before = trainer.order.entries
        for prompt_id in names(6):
            again = asked(prompt_id, trainer.step - 1, prefix_token_ids=[1])
            greedy = asked(prompt_id, trainer.step - 1, sampling=SamplingParams(temperature=0.0))
            assert trainer.order.ask(again) is trainer.order.ask(greedy) is None
        assert trainer.order.entries == before
    assert list(trainer.hints) == [5, 6]


def test_a_trainer_that_starts_over_is_learned_again() -> None:
    trainer = Trainer()
    trainer.go_through(cut(names(6), 2) * 2)
    trainer.hints.clear()
    # One that comes late does not count.
    assert trainer.order.ask(asked("5", trainer.step - 2)) is None
    trainer.step = 0
    trainer.go_through(cut(names(6), 2) * 2)
    assert list(trainer.hints) == [5, 6]


def test_a_forecast_for_another_step_than_the_one_that_comes_is_a_miss() -> None:
    trainer = Trainer()
    trainer.go_through(cut(names(6), 2) * 2)
    trainer.step += 5
    trainer.go_through(cut(names(6), 2)[:2])
    assert trainer.order.missed == 1


def test_prompts_keep_the_sampling_parameters_that_they_had() -> None:
    order, found = EpochOrder(100, 1000), []
    for step, prompt_id in enumerate(names(3) * 3):
        own = OTHER if prompt_id == "2" else SAMPLING
        if (hint := order.ask(asked(prompt_id, step, sampling=own, policy_version=step + 10))) is not None:
            found.append(hint)
    by_step = {hint.step: hint for hint in found}
    assert by_step[5].sampling == SAMPLING
    assert list(by_step[5].groups) == [Group("2", by_step[5].groups[0].prompt_token_ids, 1, OTHER)]
    assert by_step[5].policy_version == 15
    assert by_step[6].sampling == OTHER
    assert by_step[6].groups[0].sampling == SAMPLING


def test_steps_of_which_no_prompt_counts_are_not_kept() -> None:
    order = EpochOrder(1 << 16, 1 << 20)
    for step in range(100):
        order.ask(asked("1", step, slot=1 << 20))
    assert not order._over
    trainer = Trainer(order, step=100)
    trainer.go_through([["1", "2"], ["3", "4"]] * 3)
    assert trainer.forecast()
