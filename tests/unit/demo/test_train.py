"""The trainer's schedule and what it hands to the learner."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import pytest

from examples.tinymath import tokenizer
from examples.tinymath.options import WORDS_OPTIONS, Options, add_options, read_options
from examples.tinymath.train import groups, lessons, plan, reward
from paceline import Exactness, ExactnessLevel, FinishReason, Provenance, Sample, SampleStatus

SMALL = Options(steps=5, prompts=4, samples=2, pool=8)


def sample(prompt_id: str, slot: int, text: str) -> Sample:
    ids = np.array(tokenizer.encode(text))
    return Sample(
        prompt_id=prompt_id,
        slot=slot,
        token_ids=ids,
        logprobs=np.full(len(ids), -0.5, np.float32),
        finish_reason=FinishReason.STOP,
        status=SampleStatus.COMPLETED,
        version_spans=(),
        provenance=Provenance(),
        seed=0,
    )


def test_the_plan_is_the_same_every_time_and_goes_through_the_pool() -> None:
    first, again = list(plan(SMALL)), list(plan(SMALL))
    assert first == again
    assert [len(step) for step in first] == [4] * 5
    epoch = [problem.id for step in first[:2] for problem in step]
    assert len(set(epoch)) == 8
    assert set(epoch) == {problem.id for step in first[2:4] for problem in step}


def test_a_group_is_a_problem() -> None:
    problems = next(plan(SMALL))
    made = groups(problems, SMALL)
    assert [group.prompt_id for group in made] == [problem.id for problem in problems]
    assert all(group.samples == 2 for group in made)
    assert list(made[0].prompt_token_ids) == tokenizer.prompt_ids(problems[0].question)


def test_lessons_do_not_depend_on_who_finished_first() -> None:
    problems = next(plan(SMALL))
    samples = [sample(problem.id, slot, f"#{slot}<eos>") for problem in problems for slot in range(2)]
    one = lessons(problems, samples, reward(problems, samples))
    other = lessons(problems, samples[::-1], reward(problems, samples[::-1]))
    assert one == other
    assert one[0].logprobs == [-0.5] * len(one[0].response_ids)


def test_the_right_answer_is_rewarded() -> None:
    problem = next(plan(SMALL))[0]
    right, wrong = sample(problem.id, 0, f"#{problem.answer}<eos>"), sample(problem.id, 1, "<eos>")
    assert reward([problem], [right, wrong]) == [1.0, 0.0]


def read(*flags: str, usual: Options | None = None) -> Options:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return read_options(parser.parse_args(flags), usual or Options())


def test_what_is_not_given_is_as_usual_for_the_model() -> None:
    assert read() == Options()
    assert read(usual=WORDS_OPTIONS) == WORDS_OPTIONS
    assert read("--steps=2", "--lr=0", usual=WORDS_OPTIONS) == replace(WORDS_OPTIONS, steps=2, lr=0.0)


def test_lenience_goes_with_lenient_only() -> None:
    assert read().asked == Exactness(ExactnessLevel.EXACT, None)
    assert read("--exactness=coupled_history").asked == Exactness(ExactnessLevel.COUPLED_HISTORY, None)
    assert read("--exactness=lenient", "--lenience=2").asked == Exactness(ExactnessLevel.LENIENT, 2.0)


def test_an_exactness_that_needs_draft_probabilities_is_not_offered() -> None:
    with pytest.raises(SystemExit):
        read("--exactness=rejection")
