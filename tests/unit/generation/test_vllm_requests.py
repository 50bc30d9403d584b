"""What is sampled is what was asked for: every parameter, at the edges of its range and together with others."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.errors import InvalidArgument
from services.contracts.sampling import MOST_TOP_LOGPROBS, RANGES, ModelLimits, Sampling, check_sampling
from services.generation.engine.sampling.inputs import SETTINGS_KEY, BatchSettings, SampleSettings
from services.generation.engine.text import StopStrings
from services.generation.engine.types import EngineRequest
from services.generation.engine.v2.row_sampler import settings_of
from services.generation.engine.vllm_requests import WRONG_VALUES, PrefixHits, VllmRequests, refused

VOCAB, LENGTH, END = 64, 40, 63
LIMITS = ModelLimits(VOCAB, LENGTH, has_text=True, end_tokens=(END,))
PROMPT, SEED = (1, 2, 3), 2**64 - 1
# What our side of an engine reads of a request, by the name of the parameter; the others are checked one by one.
AS_ASKED = ("temperature", "top_k", "top_p", "min_p", "min_tokens", "processed_logprobs", "top_logprobs")
AS_ASKED += ("prompt_logprobs", "json_schema", "presence_penalty", "frequency_penalty", "repetition_penalty")
ELSEWHERE = {
    "max_tokens",
    "stop_token_ids",
    "stop",
    "allowed_token_ids",
    "ignore_eos",
    "unknown_logprobs_mode",
}


def single(value: float) -> float:
    """Return a number as a message brings it."""
    return float(np.float32(value))


def edges(name: str) -> list[Any]:
    """Return the least and the greatest allowed values of a parameter, and what switches it off."""
    bounds = RANGES[name]
    if name == "top_k":
        return [bounds.off, bounds.least, bounds.most]
    inner = np.nextafter(np.float32(bounds.least), np.float32(np.inf))
    outer = np.nextafter(np.float32(bounds.most), np.float32(-np.inf))
    least = [] if bounds.open else [single(bounds.least)]
    return [bounds.off, *least, float(inner), float(outer), single(bounds.most)]


def requests(coupled: bool = True) -> VllmRequests:
    return VllmRequests(LIMITS, None, StopStrings(None), PrefixHits.__new__(PrefixHits), coupled=coupled)


def check(sampling: Sampling) -> None:
    """Translate a sample that is allowed, and compare all that is read of it with what was asked."""
    assert check_sampling(sampling, LIMITS, "sampling") == []
    built = requests().request(EngineRequest("s", PROMPT, (), sampling, SEED))
    params = built.sampling_params
    assert params is not None
    settings = SampleSettings(**params.extra_args[SETTINGS_KEY])  # type: ignore[index]
    assert settings == settings_of(params)
    assert {name: getattr(settings, name) for name in AS_ASKED} == {
        name: getattr(sampling, name) for name in AS_ASKED
    }
    assert (settings.seed, settings.allowed) == (SEED, sampling.allowed_token_ids)
    stops = sampling.stops(LIMITS)
    assert set(params.stop_token_ids or ()) == stops
    assert set(settings.forbidden) == (stops if sampling.min_tokens else set())
    room = LENGTH - len(PROMPT)
    assert params.max_tokens == min(room, sampling.max_tokens or room)
    # vLLM applies nothing of its own, and the samplers of both engines read ours.
    neutral = (params.temperature, params.top_p, params.top_k, params.min_p, params.min_tokens)
    assert neutral == (1, 1, 0, 0, 0)
    for penalty in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert getattr(params, penalty) == getattr(sampling, penalty)
    batch = BatchSettings.of([settings])
    assert batch.temperature[0] == single(sampling.temperature)
    assert (0 if batch.top_k is None else batch.top_k[0]) == sampling.top_k
    assert (1 if batch.top_p is None else batch.top_p[0]) == single(sampling.top_p)
    assert (0 if batch.min_p is None else batch.min_p[0]) == single(sampling.min_p)
    assert batch.seeds.view(np.uint64)[0] == SEED


def test_every_parameter_is_compared() -> None:
    assert {each.name for each in fields(Sampling)} == {*AS_ASKED, *ELSEWHERE}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in RANGES for value in edges(name)])
def test_the_edges_of_every_range_are_sampled_as_asked(name: str, value: Any) -> None:
    check(replace(Sampling(), **{name: value}))


NUMBERS = {name: st.sampled_from(edges(name)) for name in RANGES}
TEMPERATURES = [*edges("temperature"), *map(single, (0.001, 0.0099, 0.01, 2, 2.5, 100))]
NUMBERS |= {"temperature": st.sampled_from(TEMPERATURES)}
TOKENS = st.lists(st.integers(0, VOCAB - 2), max_size=4, unique=True).map(tuple)


@given(
    st.builds(
        Sampling,
        **NUMBERS,
        max_tokens=st.none() | st.integers(5, LENGTH),
        min_tokens=st.integers(0, 5),
        stop_token_ids=TOKENS,
        # With one that ends nothing.
        allowed_token_ids=st.just(())
        | TOKENS.map(lambda ids: (*ids, *(t for t in range(10) if t not in ids))),
        ignore_eos=st.booleans(),
        processed_logprobs=st.booleans(),
        top_logprobs=st.sampled_from([0, 1, MOST_TOP_LOGPROBS]),
        prompt_logprobs=st.sampled_from([None, 0, MOST_TOP_LOGPROBS]),
    )
)
def test_all_parameters_together_are_sampled_as_asked(sampling: Sampling) -> None:
    check(sampling)


def test_vllms_own_sampler_draws_no_other_temperature_than_asked() -> None:
    own = requests(coupled=False)

    def build(temperature: float) -> Any:
        request = EngineRequest("s", PROMPT, (), Sampling(temperature=temperature, min_p=0.5), SEED)
        return own.request(request).sampling_params

    for temperature in (0, 0.01, 1, 2):
        assert (build(temperature).temperature, build(0.5).min_p) == (temperature, 0.5)
    with pytest.raises(ValueError, match=r"0\.0099"):
        build(0.0099)
    with pytest.raises(WRONG_VALUES, match="temperature") as raised:
        build(2.5)
    (violation,) = refused(raised.value).violations
    assert violation.field == "sampling.temperature"
    assert "[0, 2]" in violation.description


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (ValueError("repetition_penalty must be greater than zero"), "sampling.repetition_penalty"),
        (ValueError("top_k must be an integer"), "sampling.top_k"),
        (KeyError("x"), "sampling"),
        (ValueError(), "sampling"),
    ],
)
def test_what_an_engine_does_not_take_names_the_parameter(error: Exception, field: str) -> None:
    assert [each.field for each in refused(error).violations] == [field]


def test_an_engine_takes_a_sample_or_refuses_it_and_keeps_nothing() -> None:
    from services.generation.engine.core import Engine

    engine, gone = Engine.__new__(Engine), list[str]()
    engine.asleep, engine._requests = False, requests(coupled=False)
    engine.abort = gone.extend  # type: ignore[assignment]
    with pytest.raises(InvalidArgument) as raised:
        engine.add(EngineRequest("s", PROMPT, (), Sampling(temperature=2.5), SEED))
    assert [each.field for each in raised.value.violations] == ["sampling.temperature"]
    assert gone == ["s"]
