"""The tasks: the same on every machine, honest about their rewards, and with a long tail of work."""

from __future__ import annotations

from random import Random

import pytest

from examples.tinymath import tasks, tokenizer, traces

pytest.importorskip("reasoning_gym")

SEEDS = range(5)
PER_SEED = 200


@pytest.fixture(scope="module")
def problems() -> list[tasks.Problem]:
    return [problem for seed in SEEDS for problem in tasks.make_problems(seed, PER_SEED)]


def test_the_same_seed_gives_the_same_problems() -> None:
    assert tasks.make_problems(7, 50) == tasks.make_problems(7, 50)
    assert tasks.make_problems(7, 50) != tasks.make_problems(8, 50)


def test_an_id_names_its_problem(problems: list[tasks.Problem]) -> None:
    assert [tasks.load_problem(problem.id) for problem in problems] == problems


def test_every_family_occurs(problems: list[tasks.Problem]) -> None:
    assert {problem.family for problem in problems} == set(tasks.FAMILIES)


def test_problems_of_some_families_are_of_no_others() -> None:
    drawn = tasks.make_problems(0, 50, tasks.PRACTICE)
    assert {problem.family for problem in drawn} == set(tasks.PRACTICE) < set(tasks.FAMILIES)


def test_shares_add_up_to_one() -> None:
    assert sum(family.share for family in tasks.FAMILIES.values()) == pytest.approx(1)
    for family in tasks.FAMILIES.values():
        assert sum(level.share for level in family.levels) == pytest.approx(1)


def test_the_verifier_accepts_every_trace(problems: list[tasks.Problem]) -> None:
    rng = Random(0)
    for problem in problems:
        for text in (tasks.trace(problem), tasks.trace(problem, rng)):
            assert text.endswith(tokenizer.EOS)
            assert problem.reward(text) == 1.0, (problem, text)


def test_each_written_step_is_true(problems: list[tasks.Problem]) -> None:
    for problem in problems:
        if problem.family in ("chain_sum", "gcd", "products"):
            working = tasks.trace(problem).partition(tasks.MARK)[0]
            for line in working.replace(":", ";").replace(">", ";").replace(",", ";").split(";"):
                left, equals, right = line.partition("=")
                assert not equals or eval(left) == int(right), (problem, line)


@pytest.mark.parametrize("response", ["", "12", tasks.MARK, f"{tasks.MARK}{tokenizer.EOS}", f"{tasks.MARK}?"])
def test_a_response_without_an_answer_earns_nothing(problems: list[tasks.Problem], response: str) -> None:
    assert {problem.reward(response) for problem in problems} == {0.0}


def test_wrong_answers_earn_less(problems: list[tasks.Problem]) -> None:
    for problem in problems:
        wrong = (
            "x" + problem.answer[1:] if problem.family == "spell_backward" else str(int(problem.answer) + 1)
        )
        assert 0.0 <= problem.reward(tasks.MARK + wrong) < 1.0


def test_only_what_stands_before_the_end_token_counts(problems: list[tasks.Problem]) -> None:
    problem = problems[0]
    assert problem.reward(f"{tasks.MARK}?{tokenizer.EOS}{tasks.MARK}{problem.answer}") == 0.0


def test_questions_are_short_and_solutions_have_a_long_tail(problems: list[tasks.Problem]) -> None:
    assert max(len(problem.question) for problem in problems) <= tasks.MAX_QUESTION
    lengths = sorted(len(tokenizer.encode(tasks.trace(problem))) for problem in problems)
    assert lengths[-1] <= tasks.MAX_TRACE
    assert lengths[-1] >= 600
    assert lengths[int(0.95 * len(lengths))] >= 3 * lengths[len(lengths) // 2]


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (traces.add(357, 28), "7+8=15,5+2+1=8,3+0=3,"),
        (traces.add(0, 0), "0+0=0,"),
        (traces.subtract(352, 28), "12-8=4,5-2-1=2,3-0=3,"),
        (traces.signed_sum(12, -40), "12-40:10-2=8,4-1-1=2,>-28;"),
        (traces.gcd(4, 6), ("6-4=2;4-2=2;2-2=0;", "2")),
        (traces.times_digit(347, 6), "7*6=42,4*6+4=28,3*6+2=20,"),
        (traces.spell_backward("sun"), ("1s2u3n>3n2u1s;", "nus")),
        (traces.count_bits(5), ("5:1,2:1,1:2,", "2")),
    ],
)
def test_traces_read_as_documented(got: object, want: object) -> None:
    assert got == want
