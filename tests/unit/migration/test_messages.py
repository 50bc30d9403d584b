"""A sample as it travels: what arrives is what left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.internal.v1 import generation_pb2 as pb
from paceline.times import seconds_of
from services.contracts.sampling import ModelLimits, Sampling, resolve
from services.generation.draft_cache.origin import Origin
from services.generation.engine.types import EngineRequest, SampleStep, Verifier
from services.generation.kv_transfer.block_store import Geometry
from services.generation.kv_transfer.reason import NotMoved, Reason
from services.generation.loop.samples import RunningSample
from services.generation.loop.work_items import AdmissionTerms, check_item
from services.generation.migration import protocol
from services.generation.migration.arrivals import HANDLE, UnclaimedStream
from services.generation.migration.leaving import capacity_of, check_geometry, geometry_of
from tests.unit.generation.scripted import sample_request

VERSION = 3
TERMS = AdmissionTerms(VERSION, ModelLimits(512, 256))
TOKENS = st.lists(st.integers(0, 511), min_size=1, max_size=40)
FLOAT32 = {"width": 32, "allow_nan": False}
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0, 4, **FLOAT32),
    top_p=st.floats(0.125, 1, **FLOAT32),
    top_k=st.integers(0, 100),
    min_p=st.floats(0, 1, **FLOAT32),
    repetition_penalty=st.floats(0.5, 2, **FLOAT32),
    presence_penalty=st.floats(-2, 2, **FLOAT32),
    frequency_penalty=st.floats(-2, 2, **FLOAT32),
    max_tokens=st.none() | st.integers(1, 256),
    min_tokens=st.integers(0, 1),
    stop_token_ids=st.lists(st.integers(0, 511), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    processed_logprobs=st.booleans(),
)


class Stream:
    """A stream that keeps what it is told."""

    background = False

    def __init__(self) -> None:
        self.samples: dict[int, RunningSample] = {}
        self.parked: dict[int, Any] = {}
        self.finished: list[pb.Finished] = []
        self.refused: list[pb.Refused] = []

    def add(self, sample: RunningSample, now: float) -> None:
        self.samples[sample.handle] = sample

    def take_over(self, sample: RunningSample, handle: int, now: float) -> None:
        sample.handle, sample.stream = handle, self
        self.add(sample, now)

    def reached(self, sample: RunningSample) -> None:
        raise AssertionError

    def finish(self, sample: RunningSample, event: pb.Finished) -> None:
        self.finished.append(event)

    def refuse(self, event: pb.Refused) -> None:
        self.refused.append(event)

    def flush(self, load: Any, policy_version: int, now: float, *, everything: bool = False) -> None:
        raise AssertionError

    def put(self, event: Exception | None) -> None:
        raise AssertionError


def running(request: EngineRequest, **fields: Any) -> RunningSample:
    return RunningSample(5, request, Stream(), 0.0, **fields)


@given(SAMPLINGS)
def test_sampling_parameters_come_back(sampling: Sampling) -> None:
    assert resolve(protocol.sampling_params(sampling)) == sampling


@given(TOKENS, TOKENS, st.sampled_from(Verifier), st.integers(0, 2**64 - 1), TOKENS)
def test_a_sample_comes_back_with_its_response_as_prefix(
    prompt: list[int], response: list[int], verifier: Verifier, seed: int, guess: list[int]
) -> None:
    request = sample_request(
        "s1", prompt, 200, seed=seed, given=tuple(guess), prompt_id="p", verifier=verifier, lenience=1.0
    )
    if verifier is Verifier.LENIENT:
        request = replace(request, lenience=2.5)
    sample = running(request, origin=Origin("run", "p", 4, 9), streamed=seed % 2 == 1)
    sample.record(SampleStep("s1", response, [0.0] * len(response)), 1.0, 1.5, "")
    item = protocol.item_of(sample, VERSION)
    arrived = check_item(item, TERMS, (), lambda: "s2")
    assert arrived == replace(request, sample_id="s2", prefix=tuple(response))
    assert Origin.of(item) == sample.origin
    assert item.streamed == sample.streamed


def test_counters_go_on() -> None:
    sample = running(sample_request("s1", (5,), 100))
    sample.arrived = 2.0
    sample.record(SampleStep("s1", [1, 2, 3], [0.0] * 3, drafted=4, accepted=2), 5.0, 5.5, "suffix")
    sample.record(SampleStep("s1", [4], [0.0]), 6.0, 6.25, "")
    counters = sample.finished(None, 9.0)
    # The clock of another machine.
    arrived = running(replace(sample.request, prefix=tuple(sample.response)))
    protocol.take_counters(arrived, counters, 1009.0)
    at_once = arrived.finished(None, 1009.0)
    assert at_once.cached_context_tokens == 4, "all but the last token of prompt and response"
    at_once.ClearField("cached_context_tokens")
    assert at_once == counters
    arrived.record(SampleStep("s1", [5, 6], [0.0] * 2, drafted=3, accepted=1), 1010.0, 1010.75, "suffix")
    end = arrived.finished(None, 1012.0)
    assert (end.decode_steps, end.verify_steps) == (3, 2)
    assert [(each.drafter, each.drafted, each.accepted) for each in end.draft_sources] == [("suffix", 7, 3)]
    assert (seconds_of(end.queue_time), seconds_of(end.generation_time)) == (3.0, 7.0)
    assert seconds_of(end.prefill_time) == 0.5
    assert (seconds_of(end.verify_time), seconds_of(end.plain_time)) == (0.75, 0.25)


def test_the_crc_of_a_response_tells_order_and_length() -> None:
    crcs = {protocol.tokens_crc(tokens) for tokens in ([], [1], [1, 2], [2, 1], [0, 1], [1, 0], [2**31])}
    assert len(crcs) == 7


def test_drafter_states_come_back() -> None:
    states = {"reference": b"\x00\x01", "eagle3": b""}
    assert protocol.drafter_states_of(protocol.drafter_states(states)) == states


def test_geometry_says_what_differs() -> None:
    own = geometry_of(Geometry(3, 32, 4096, "bfloat16", "B N32"), "tiny", 512, 1)
    check_geometry(own, own)
    other = geometry_of(Geometry(3, 16, 2048, "bfloat16", "B N16"), "tiny", 512, 1)
    with pytest.raises(NotMoved, match="block_size is 16, here 32") as caught:
        check_geometry(own, other)
    assert caught.value.reason is Reason.GEOMETRY


@given(st.integers(1, 4096), st.integers(0, 4096))
def test_a_reservation_has_room_to_grow_and_not_beyond_the_end(tokens: int, room: int) -> None:
    capacity = capacity_of(tokens, tokens + room)
    assert tokens <= capacity <= tokens + room
    assert capacity > tokens or room == 0


# -- unclaimed --------------------------------------------------------------------------------------------------


def test_an_unclaimed_sample_keeps_its_tokens_for_its_stream() -> None:
    stream, unclaimed = Stream(), UnclaimedStream()
    sample = RunningSample(HANDLE, sample_request("s1"), unclaimed, 0.0)
    unclaimed.samples[HANDLE] = sample
    sample.record(SampleStep("s1", [1, 2], [-1.0, -2.0]), 1.0, 1.5, "")
    unclaimed.flush(None, 0, 1.0, everything=True)  # type: ignore[arg-type]
    unclaimed.hand_over(stream, 7, 1.0)  # type: ignore[arg-type]
    assert stream.samples == {7: sample}
    assert sample.stream is stream
    delta = sample.take_delta()
    assert delta is not None
    assert (delta.handle, list(delta.tokens.token_ids)) == (7, [1, 2])


def test_a_sample_that_ended_unclaimed_ends_for_its_stream() -> None:
    stream, unclaimed = Stream(), UnclaimedStream()
    sample = RunningSample(HANDLE, sample_request("s1"), unclaimed, 0.0)
    unclaimed.samples[HANDLE] = sample
    unclaimed.finish(sample, pb.Finished(handle=HANDLE, decode_steps=4))
    unclaimed.hand_over(stream, 7, 1.0)  # type: ignore[arg-type]
    assert stream.samples == {}
    assert [(each.handle, each.decode_steps) for each in stream.finished] == [(7, 4)]


def test_a_sample_that_failed_unclaimed_fails_for_its_stream() -> None:
    stream, unclaimed = Stream(), UnclaimedStream()
    unclaimed.refuse(pb.Refused(handle=HANDLE, message="no finite logits"))
    unclaimed.hand_over(stream, 7, 1.0)  # type: ignore[arg-type]
    assert [(each.handle, each.message) for each in stream.refused] == [(7, "no finite logits")]
