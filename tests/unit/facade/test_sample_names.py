"""Names and seeds of samples: counted, given, or those of the sample that a request goes on with."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import types as t
from services.contracts.errors import InvalidArgument
from services.facade import sample_names as module
from services.facade.dialects.body import prompt_id_of
from services.facade.sample_names import (
    AbortedSamples,
    GivenNames,
    RequestedSamples,
    SampleNames,
    given_names,
)
from services.facade.samples import SampleOutput
from tests.support.token_columns import buffer

SAMPLING = t.SamplingParams(max_tokens=20)
RUN = GivenNames("run")


def asked(*prompts: list[int], each: int = 1, seed: int | None = None, **sampling: Any) -> RequestedSamples:
    return RequestedSamples(prompts, each, t.SamplingParams(**{"max_tokens": 20, **sampling}), seed)


def ended(
    request: t.SampleRequest, tokens: list[int], reason: t.FinishReason | None = t.FinishReason.ABORTED
) -> SampleOutput:
    """Return a sample that has ended with these tokens."""
    logprobs = [-0.5 * token for token in tokens]
    return SampleOutput(request, buffer(tokens, logprobs), reason)


def keys(requests: list[t.SampleRequest]) -> list[tuple[int, int]]:
    return [(request.step, request.slot) for request in requests]


def test_without_a_seed_slots_are_counted_by_prompt_and_step_under_the_seed_of_the_process() -> None:
    names = SampleNames(alone=True)
    first = names.requests(asked([1], [2], [1], each=2), RUN, step=3)
    assert keys(first) == [(3, 0), (3, 1), (3, 0), (3, 1), (3, 2), (3, 3)]
    assert keys(names.requests(asked([1]), RUN, step=3)) == [(3, 4)]
    assert keys(names.requests(asked([1]), RUN, step=4)) == [(4, 0)]
    assert keys(names.requests(asked([1]), GivenNames("other"), step=3)) == [(3, 0)]
    assert {request.run_seed for request in first} == {names.seed}
    assert names.seed != SampleNames(alone=True).seed


def test_of_several_processes_each_counts_slots_from_a_number_of_its_own() -> None:
    firsts = {SampleNames(alone=False).requests(asked([1]), RUN, step=0)[0].slot for _ in range(50)}
    assert len(firsts) > 25
    assert max(firsts) < 1 << 31


def test_counts_that_are_forgotten_begin_anew_with_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_COUNTED", 2)
    names = SampleNames(alone=True)
    found = [names.requests(asked([prompt]), RUN, step=0)[0] for prompt in (1, 2, 3, 1)]
    assert [request.slot for request in found] == [0, 0, 0, 0]
    assert found[0].run_seed == found[1].run_seed != found[2].run_seed == found[3].run_seed


def test_samples_beyond_the_most_slots_have_them_again_with_another_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_SLOTS", 2)
    names = SampleNames(alone=True)
    found = names.requests(asked([1], each=5), RUN, step=0)
    assert [request.slot for request in found] == [0, 1, 0, 1, 0]
    assert len({(request.slot, request.run_seed) for request in found}) == 5
    assert found[0].run_seed == names.seed


def test_headers_name_run_step_prompt_slot_and_prefix() -> None:
    headers = {
        "X-Paceline-Step": "7",
        "X-Paceline-Prompt": "p1",
        "X-Paceline-Slot": "4",
        "X-Paceline-Prefix": "2",
    }
    given = given_names({**headers, "X-Paceline-Run": "mine"}, "http")
    assert given == GivenNames("mine", 7, "p1", 4, 2)
    assert given_names({}, "http") == GivenNames("http")
    one, two = SampleNames(alone=False).requests(asked([1, 2, 3, 4], each=2, seed=5, min_tokens=3), given, 0)
    assert (one.run_id, one.step, one.prompt_id, one.slot, one.run_seed) == ("mine", 7, "p1", 4, 5)
    assert (one.prompt_token_ids, one.prefix_token_ids) == ([1, 2], [3, 4])
    assert (one.sampling.max_tokens, one.sampling.min_tokens) == (22, 5)
    assert two.slot == 5
    unnamed = GivenNames("mine", slot=0, prefix=2)
    (sample,) = SampleNames(alone=True).requests(asked([1, 2, 3, 4], seed=5), unnamed, 0)
    assert sample.prompt_id == prompt_id_of([1, 2])


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"X-Paceline-Step": "-1"}, "X-Paceline-Step"),
        ({"X-Paceline-Step": "9" * 400}, "X-Paceline-Step"),
        ({"X-Paceline-Slot": "one", "X-Paceline-Prompt": "p"}, "X-Paceline-Slot"),
        ({"X-Paceline-Prefix": str(1 << 31)}, "X-Paceline-Prefix"),
        ({"X-Paceline-Slot": "0"}, "seed"),
        ({"X-Paceline-Prefix": "2"}, "X-Paceline-Prefix"),
        ({"X-Paceline-Prompt": "p"}, "X-Paceline-Prompt"),
        ({"X-Paceline-Prompt": "p" * 257}, "X-Paceline-Prompt"),
        ({"X-Paceline-Run": "r" * 129}, "X-Paceline-Run"),
    ],
)
def test_a_header_that_does_not_fit_is_named(headers: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        SampleNames(alone=True).requests(asked([1, 2], [3, 4, 5]), given_names(headers, "http"), 0)
    assert [violation.field for violation in refused.value.violations] == [field]


def test_a_limit_that_means_no_limit_stays_one_with_a_prefix() -> None:
    most = (1 << 31) - 1
    (sample,) = SampleNames(alone=True).requests(
        asked([1, 2, 3], seed=5, max_tokens=most), GivenNames("mine", slot=0, prefix=2), 0
    )
    assert (sample.sampling.max_tokens, sample.sampling.min_tokens) == (most, None)


@pytest.mark.parametrize("seed", [None, 9])
def test_an_aborted_sample_goes_on_under_its_names_however_often(seed: int | None) -> None:
    names = SampleNames(alone=True)
    first, second = names.requests(asked([1, 2], each=2, seed=seed), RUN, step=3)
    names.settle([ended(first, [5, 6]), ended(second, [5, 7])])
    (rest,) = names.requests(asked([1, 2, 5, 7], seed=seed), RUN, step=4)
    assert (rest.step, rest.slot, rest.prompt_id, rest.run_seed) == (
        3, 1, second.prompt_id, second.run_seed
    )  # fmt: skip
    assert (rest.prompt_token_ids, rest.prefix_token_ids) == ([1, 2], [5, 7])
    assert list(rest.prefix_logprobs) == [-2.5, -3.5]
    assert rest.sampling.max_tokens == 22
    names.settle([ended(rest, [8])])
    (last,) = names.requests(asked([1, 2, 5, 7, 8], seed=seed), RUN, step=5)
    assert (last.slot, last.prefix_token_ids, list(last.prefix_logprobs)) == (
        1,
        [5, 7, 8],
        [-2.5, -3.5, -4.0],
    )
    # It was taken: what comes now is a prompt like any other.
    (other,) = names.requests(asked([1, 2, 5, 7], seed=seed), RUN, step=5)
    assert (other.prompt_token_ids, other.prefix_token_ids) == ([1, 2, 5, 7], [])


def test_samples_with_equal_tokens_go_on_one_by_one() -> None:
    names = SampleNames(alone=True)
    samples = names.requests(asked([1], each=3), RUN, step=0)
    names.settle([ended(each, [4]) for each in samples])
    resumed = names.requests(asked([1, 4], each=4), RUN, step=0)
    assert [(each.slot, len(each.prefix_token_ids)) for each in resumed] == [(0, 1), (1, 1), (2, 1), (0, 0)]


def test_only_what_fits_the_request_goes_on() -> None:
    names = SampleNames(alone=True)
    (sample,) = names.requests(asked([1], seed=7), RUN, step=0)
    names.settle([ended(sample, [4])])
    refused = [
        (asked([1, 4], seed=8), RUN),
        (asked([1, 4], seed=7), GivenNames("other")),
        (asked([1, 4], seed=7), GivenNames("run", slot=1)),
        (asked([1, 4], seed=7), GivenNames("run", prefix=0)),
        (asked([1, 4], seed=7, prompt_logprobs=0), RUN),
    ]
    for request, given in refused:
        (other,) = names.requests(request, given, 0)
        assert other.prompt_token_ids == [1, 4], (request, given)
    (rest,) = names.requests(asked([1, 4], seed=7), GivenNames("run", slot=0), 0)
    assert rest.prefix_token_ids == [4]


def test_samples_that_ended_or_have_nothing_are_not_remembered_and_each_is_once() -> None:
    names = SampleNames(alone=True)
    one, two, three = names.requests(asked([1], each=3), RUN, step=0)
    outputs = [ended(one, [4], t.FinishReason.STOP), ended(two, []), ended(three, [4], None)]
    names.settle(outputs)
    assert names.requests(asked([1, 4]), RUN, 0)[0].prompt_token_ids == [1, 4]
    aborted = ended(one, [4])
    names.settle([aborted])
    names.settle([aborted])
    rests = names.requests(asked([1, 4], each=2), RUN, 0)
    assert [len(rest.prefix_token_ids) for rest in rests] == [1, 0]


def test_a_rest_that_fails_may_be_asked_for_again() -> None:
    names = SampleNames(alone=True)
    (sample,) = names.requests(asked([1]), RUN, step=0)
    names.settle([ended(sample, [4])])
    (rest,) = names.requests(asked([1, 4]), RUN, step=0)
    # Its client has left, and knows nothing of what came meanwhile.
    names.settle([ended(rest, [5, 6], None)])
    (again,) = names.requests(asked([1, 4]), RUN, step=0)
    assert again == rest


def test_the_memory_of_aborted_samples_is_bounded_by_samples_and_by_tokens() -> None:
    (sample,) = SampleNames(alone=True).requests(asked([1]), RUN, step=0)

    def kept(aborted: AbortedSamples, lengths: list[int]) -> list[int]:
        names = SampleNames(alone=True)
        names.aborted = aborted
        for number, length in enumerate(lengths):
            names.settle([ended(sample, [number] * length)])
        resent = [[1, *[number] * length] for number, length in enumerate(lengths)]
        found = [names.requests(asked(tokens), RUN, step=0)[0] for tokens in resent]
        return [number for number, each in enumerate(found) if each.prefix_token_ids]

    assert kept(AbortedSamples(most=2), [1, 1, 1]) == [1, 2]
    assert kept(AbortedSamples(most_tokens=10), [6, 4, 5]) == [1, 2]
    assert kept(AbortedSamples(most_tokens=10), [11]) == []
