"""Translation keeps everything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import convert
from paceline import types as t
from paceline.blocking import finish
from paceline.calls import GatewayCalls
from paceline.convert import rollouts
from paceline.v1 import rollout_pb2, sample_pb2, weight_pb2
from tests.support.token_columns import columns
from tests.unit.sdk.scripted_transport import ScriptedTransport


def submission(batch: t.Batch) -> rollout_pb2.SubmitRolloutsRequest:
    return convert.batch_to_proto(batch, rollout_pb2.SubmitRolloutsRequest)


def of_a_sample(exactness: sample_pb2.Exactness) -> t.Exactness:
    return convert.provenance(sample_pb2.Provenance(exactness=exactness)).exactness


def test_unset_sampling_fields_stay_unset() -> None:
    message = convert.sampling_to_proto(t.SamplingParams(top_k=0, temperature=0.0))
    assert message.HasField("top_k")
    assert message.HasField("temperature")
    assert not message.HasField("top_p")
    assert not message.HasField("max_tokens")


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**32 - 1)), st.integers(1, 2**31))
def test_a_batch_keeps_its_numbers(seed: int, prompt: list[int], samples: int) -> None:
    group = t.Group("p", prompt, samples, t.SamplingParams(min_p=0.5), expected_tokens=3)
    message = submission(t.Batch("r", "b", 1, 2, [group], run_seed=seed, deadline=1.5))
    assert message.run_seed == seed
    assert list(message.groups[0].prompt_token_ids) == prompt
    assert message.groups[0].samples == samples
    assert message.groups[0].sampling.min_p == 0.5
    assert message.deadline.ToMilliseconds() == 1500


def test_priority_and_weight_are_sent() -> None:
    message = submission(t.Batch("r", "b", 1, 2, [], priority=-3, weight=4))
    assert (message.priority, message.weight) == (-3, 4)
    assert submission(t.Batch("r", "b", 1, 2, [])).weight == 1


def test_no_deadline_is_none() -> None:
    assert not submission(t.Batch("r", "b", 1, 2, [])).HasField("deadline")


@pytest.mark.parametrize("level", [level for level in t.ExactnessLevel])
def test_exactness_there_and_back(level: t.ExactnessLevel) -> None:
    wanted = t.Exactness(level, 1.5 if level is t.ExactnessLevel.LENIENT else None)
    assert of_a_sample(convert.exactness_to_proto(wanted)) == wanted


@given(
    st.none() | st.floats(1, 1e6),
    st.integers(0, 2**32 - 1),
    st.none() | st.floats(1e-9, 1e3),
    st.none() | st.floats(1e-6, 1),
)
def test_all_of_a_lenient_exactness_goes_there_and_back(
    lenience: float | None, delay: int, target: float | None, floor: float | None
) -> None:
    wanted = t.Exactness(t.ExactnessLevel.LENIENT, lenience, delay, target, floor)
    message = convert.exactness_to_proto(wanted)
    assert [message.HasField(name) for name in ("lenience", "kl_target", "diversity_floor")] == [
        value is not None for value in (lenience, target, floor)
    ]
    assert of_a_sample(message) == wanted


def test_provenance_tells_of_the_cached_rollout() -> None:
    message = sample_pb2.Provenance(reused_prefix=3, cached_tokens=9, lossless=False)
    provenance = convert.provenance(message)
    assert (provenance.reused_prefix, provenance.cached_tokens, provenance.lossless) == (3, 9, False)


def test_spans_and_updates_tell_of_kept_kv() -> None:
    runs = [sample_pb2.VersionRun(tokens=each, policy_version=4) for each in (1, 2)]
    runs.append(sample_pb2.VersionRun(tokens=2, policy_version=5, mixed_kv=True))
    tokens = sample_pb2.TokenColumns(versions=runs)
    wanted = (t.VersionSpan(0, 3, 4), t.VersionSpan(3, 5, 5, mixed_kv=True))
    assert convert.sample(sample_pb2.Sample(tokens=tokens)).version_spans == wanted
    call = rollout_pb2.StreamRolloutsResponse(calls=[rollout_pb2.SampleCall(begin=9, tokens=tokens)])
    wanted = (t.VersionSpan(9, 12, 4), t.VersionSpan(12, 14, 5, mixed_kv=True))
    assert [each.version_spans for each in convert.sample_calls(call)] == [wanted]
    answer = weight_pb2.FinishUpdateResponse(instances=[weight_pb2.InstanceUpdate(kept_samples=6)])
    assert [each.kept_samples for each in convert.update_finished(answer).instances] == [6]


def test_a_report_has_only_measured_values() -> None:
    transport = ScriptedTransport({"ReportRewards": rollout_pb2.ReportRewardsResponse()})
    client = GatewayCalls(transport)
    finish(client.report_rewards("run", "b", [t.Reward("p", 1, 0.5)]))
    request = transport.requests["ReportRewards"]
    assert isinstance(request, rollout_pb2.ReportRewardsRequest)
    assert not request.HasField("kl")
    assert not request.HasField("clip_fraction")
    finish(client.report_rewards("run", "b", [], kl=0.0, clip_fraction=0.25))
    measured = transport.requests["ReportRewards"]
    assert isinstance(measured, rollout_pb2.ReportRewardsRequest)
    assert measured.HasField("kl"), "0 is a measurement too"
    assert (measured.kl, measured.clip_fraction) == (0.0, 0.25)


@pytest.mark.parametrize(("number", "code"), [(3, "INVALID_ARGUMENT"), (14, "UNAVAILABLE"), (99, "UNKNOWN")])
def test_a_failed_sample_tells_code_field_and_reason(number: int, code: str) -> None:
    message = sample_pb2.Sample(status=sample_pb2.SAMPLE_STATUS_FAILED, error="f: why")
    assert rollouts.sample(message).failure is None
    message.failure.CopyFrom(sample_pb2.SampleFailure(code=number, field="f", reason="why"))
    assert rollouts.sample(message).failure == t.SampleFailure(code, "f", "why")


def test_an_enum_value_from_the_future_is_unspecified() -> None:
    message = sample_pb2.Sample(tokens=columns([1], [0.0]))
    message.status = 99  # type: ignore[assignment]
    assert convert.sample(message).status is t.SampleStatus.UNSPECIFIED


def test_instance_spans_are_in_seconds() -> None:
    message = sample_pb2.Provenance(accepted=6, verify_steps=3)
    span = message.instance_spans.add(instance_id="i0", begin_token=0, end_token=5)
    span.begin.FromMilliseconds(1_700_000_000_250)
    span.end.FromMilliseconds(1_700_000_001_500)
    provenance = convert.provenance(message)
    assert provenance.instance_spans[0].begin == pytest.approx(1_700_000_000.25)
    assert provenance.instance_spans[0].end == pytest.approx(1_700_000_001.5)
    assert provenance.block_efficiency == 3.0
    assert t.Provenance().block_efficiency == 1.0


def test_all_constraints_of_sampling_are_sent() -> None:
    params = t.SamplingParams(
        stop=("a", "bc"), allowed_token_ids=(4, 5), json_schema="{}", top_logprobs=3, prompt_logprobs=0
    )
    message = convert.sampling_to_proto(params)
    assert (list(message.stop), list(message.allowed_token_ids)) == (["a", "bc"], [4, 5])
    assert (message.json_schema, message.top_logprobs) == ("{}", 3)
    assert message.HasField("prompt_logprobs")
    assert not convert.sampling_to_proto(t.SamplingParams()).HasField("prompt_logprobs")
    lone = t.SamplingParams(stop="bc")  # type: ignore[arg-type]
    assert list(convert.sampling_to_proto(lone).stop) == ["bc"]


def test_values_of_positions_are_a_row_of_each() -> None:
    message = sample_pb2.Sample(
        tokens=columns([5, 6], [-1, -2], top_token_ids=[5, 7, 8, 6], top_logprobs=[-1, -2, -0.5, -2]),
        stop_string="x",
        prompt_logprobs=sample_pb2.TokenColumns(logprobs=[-3], top_token_ids=[9, 1], top_logprobs=[-0.5, -1]),
    )
    sample = rollouts.sample(message)
    assert sample.stop_string == "x"
    assert sample.top_token_ids.tolist() == [[5, 7], [8, 6]]
    assert sample.top_logprobs.tolist() == [[-1, -2], [-0.5, -2]]
    told = sample.prompt_logprobs
    assert told is not None
    assert (told.logprobs.tolist(), told.top_token_ids.tolist()) == ([-3], [[9, 1]])
    plain = rollouts.sample(sample_pb2.Sample(tokens=columns([5], [-1])))
    assert (plain.top_token_ids.shape, plain.prompt_logprobs) == ((1, 0), None)
