"""The sync client against a real gRPC server."""

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2

import paceline
from paceline import Batch, Client, Group, RetryPolicy, Reward, SampleKey, SampleRequest, SamplingParams
from paceline.weights import safetensors
from tests.integration.sdk.gateway_double import GatewayDouble, until

QUICK = RetryPolicy(seconds=60, initial=0.01, maximum=0.2)


def batch(samples: int = 3, step: int = 0) -> Batch:
    groups = [Group("a", [1, 2], samples), Group("b", np.array([1, 2, 3]), samples)]
    return Batch("run", f"batch-{step}", step, 4, groups, SamplingParams(temperature=1.0), run_seed=2**64 - 1)


@pytest.fixture
def client(gateway: GatewayDouble) -> Iterator[Client]:
    with Client(gateway.address, token="secret", timeout=60, retry=QUICK) as client:
        yield client


def test_the_same_batch_twice_is_one_batch(client: Client) -> None:
    assert client.submit(batch()) == paceline.Submitted("batch-0", 6, False)
    assert client.submit(batch()).already_submitted
    with pytest.raises(paceline.AlreadyExistsError):
        client.submit(batch(samples=4))


def test_samples_come_as_arrays_with_their_place_in_the_stream(client: Client) -> None:
    client.submit(batch())
    events = list(client.stream("run", "batch-0"))
    assert [event.cursor for event in events] == [1, 2, 3, 4, 5, 6]
    assert (events[-1].finished, events[-1].total) == (6, 6)
    sample = events[4].sample
    assert sample.key == SampleKey("b", 1)
    assert sample.token_ids.dtype == np.int64
    assert sample.token_ids.tolist() == [3, 1, 7]
    assert sample.logprobs.dtype == np.float32
    assert sample.seed == 2**63 + 1
    assert sample.version_spans == (paceline.VersionSpan(0, 3, 4),)
    assert sample.status is paceline.SampleStatus.COMPLETED


def test_a_stream_goes_on_from_its_cursor(client: Client) -> None:
    client.submit(batch())
    assert [event.cursor for event in client.stream("run", "batch-0", cursor=4)] == [5, 6]


def test_a_gateway_restart_is_invisible_to_a_stream(gateway: GatewayDouble, client: Client) -> None:
    client.submit(batch())
    gateway.state.stall_after = 3
    events = client.stream("run", "batch-0")
    seen = [next(events).cursor, next(events).cursor]

    def restart() -> None:
        gateway.stop()
        gateway.state.stall_after = None
        gateway.start()

    restarting = threading.Thread(target=restart)
    restarting.start()
    seen += [event.cursor for event in events]
    restarting.join()
    assert seen == [1, 2, 3, 4, 5, 6]
    assert gateway.names().count("StreamRollouts") == 2


def test_a_stream_that_was_ended_early_goes_on(gateway: GatewayDouble, client: Client) -> None:
    client.submit(batch())
    gateway.state.cut_after = 4
    assert [event.cursor for event in client.stream("run", "batch-0")] == [1, 2, 3, 4, 5, 6]


def test_unavailable_is_tried_again_no_sooner_than_the_service_asks(
    gateway: GatewayDouble, client: Client, delays: list[float]
) -> None:
    info = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=30))
    gateway.state.failures["ListInstances"] = [(grpc.StatusCode.UNAVAILABLE, "no store", [info])]
    (instance,) = client.instances()
    assert delays == [30]
    assert instance.state is paceline.InstanceState.SERVING
    assert instance.load.running == 3


def test_an_unreachable_service_is_given_up_by_the_policy(gateway: GatewayDouble) -> None:
    gateway.stop()
    retry = RetryPolicy(seconds=0.2, initial=0.01)
    with Client(gateway.address, retry=retry) as client, pytest.raises(paceline.UnavailableError):
        client.versions()


def test_close_ends_a_wait_for_the_next_attempt(
    gateway: GatewayDouble, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.stop()
    # Three short waits, and a long one that is told of when it begins.
    policy = RetryPolicy(seconds=6000, initial=6e-5, multiplier=100, maximum=60, jitter=0)
    client = Client(gateway.address, retry=policy)
    raised: list[paceline.PacelineError] = []

    def ask() -> None:
        try:
            client.versions()
        except paceline.PacelineError as error:
            raised.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: "trying again" in caplog.text)
    client.close()
    asking.join(60)
    assert isinstance(raised[0], paceline.UnavailableError)


def test_errors_carry_what_was_wrong(gateway: GatewayDouble, client: Client) -> None:
    field = error_details_pb2.BadRequest.FieldViolation(
        field="groups[0].samples", description="is 0, allowed is >= 1"
    )
    bad = error_details_pb2.BadRequest(field_violations=[field])
    gateway.state.failures["SubmitRollouts"] = [(grpc.StatusCode.INVALID_ARGUMENT, "bad batch", [bad])]
    with pytest.raises(paceline.InvalidArgumentError) as caught:
        client.submit(batch())
    assert caught.value.violations == (paceline.Violation("groups[0].samples", "is 0, allowed is >= 1"),)
    assert caught.value.request_id == "req-1"
    assert gateway.names().count("SubmitRollouts") == 1, "only UNAVAILABLE is tried again"


def test_the_token_goes_with_every_call(gateway: GatewayDouble, client: Client) -> None:
    client.submit(batch())
    list(client.stream("run", "batch-0"))
    assert {metadata["authorization"] for _, metadata in gateway.state.calls} == {"Bearer secret"}


def test_a_call_that_takes_too_long_is_ended(gateway: GatewayDouble) -> None:
    gateway.state.hanging.add("GetVersions")
    with Client(gateway.address, timeout=0.2) as client, pytest.raises(paceline.DeadlineExceededError):
        client.versions()


def test_generate_gives_deltas_then_the_sample(client: Client) -> None:
    *deltas, sample = client.generate(SampleRequest("run", "a", [1]))
    assert [delta.token_ids.tolist() for delta in deltas] == [[5], [6]]
    assert isinstance(sample, paceline.Sample)
    assert sample.token_ids.tolist() == [5, 6]


def test_generate_is_not_begun_again_after_tokens_came(gateway: GatewayDouble, client: Client) -> None:
    gateway.state.failures["Generate.middle"] = [(grpc.StatusCode.UNAVAILABLE, "instance lost", [])]
    tokens = client.generate(SampleRequest("run", "a", [1]))
    assert [next(tokens).token_ids.tolist(), next(tokens).token_ids.tolist()] == [[5], [6]]
    with pytest.raises(paceline.UnavailableError):
        next(tokens)
    assert gateway.names().count("Generate") == 1


def test_the_small_calls(client: Client) -> None:
    assert client.cancel("run", "batch-0") == 99
    assert client.cancel("run", "batch-0", [SampleKey("a", 1)], keep_partial=True) == 1
    assert client.report_rewards("run", "batch-0", [Reward("a", 0, 1.0), Reward("a", 1, 0.0)]) == 2
    assert client.hint(paceline.BatchHint("run", 1, 5, [Group("a", [1], 4)])) == 4
    assert client.pause() == ("i0",)
    assert client.drain("i0") == 5
    assert client.knobs("run") == paceline.KnobSetting(3, {"draft_cap": 16})
    assert next(iter(client.watch_fleet()))[0].epoch == 2


def test_what_an_update_measured_goes_with_the_rewards(gateway: GatewayDouble, client: Client) -> None:
    assert client.report_rewards("run", "batch-0", kl=0.01, clip_fraction=0.1) == 0
    run = client.run("run")
    assert run.report_rewards("batch-0", [Reward("a", 0, 1.0)], kl=0.02) == 1
    first, second = gateway.state.reports
    assert (first.kl, first.clip_fraction, len(first.rewards)) == (0.01, 0.1, 0)
    assert (second.kl, second.HasField("clip_fraction"), len(second.rewards)) == (0.02, False, 1)


def test_a_capability_that_is_missing_is_unimplemented(client: Client) -> None:
    with pytest.raises(paceline.UnimplementedError):
        client.set_knobs("run", paceline.KnobSetting(3, {}))


def test_a_restarted_trainer_gets_the_same_batch(client: Client) -> None:
    groups = [Group("a", [1, 2], 2)]
    first = client.run("run", seed=7).rollout(3, groups)
    again = client.run("run", seed=7).rollout(3, groups)
    assert first.batch == again.batch
    assert first.batch.policy_version == 4
    assert again.submitted.already_submitted
    assert [sample.slot for sample in again] == [0, 1]


def test_every_batch_of_a_step_has_its_own_id(client: Client) -> None:
    run = client.run("run")
    ids = [run.rollout(step, [Group("a", [1], 1)]).batch.batch_id for step in (0, 0, 1)]
    assert ids == ["step-000000.v4.0", "step-000000.v4.1", "step-000001.v4.0"]


def test_a_trainer_that_was_restarted_with_other_weights_is_not_locked_out(
    gateway: GatewayDouble, client: Client
) -> None:
    before = client.run("run", seed=7).rollout(3, [Group("a", [1, 2], 2)])
    gateway.state.version = 5
    after = client.run("run", seed=7).rollout(3, [Group("a", [1, 2], 2)])
    assert not after.submitted.already_submitted
    assert (before.batch.policy_version, after.batch.policy_version) == (4, 5)


def test_a_rollout_left_in_the_middle_goes_on(client: Client) -> None:
    rollout = client.run("run").rollout(0, [Group("a", [1], 3)])
    assert len(rollout) == 3
    first = next(iter(rollout))
    assert [first.slot, *(sample.slot for sample in rollout)] == [0, 1, 2]


@pytest.fixture
def folder(tmp_path: Path) -> paceline.WeightFolder:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return paceline.WeightFolder(tmp_path / "weights", model)


def test_weights_go_through_the_four_phases(
    gateway: GatewayDouble, client: Client, folder: paceline.WeightFolder
) -> None:
    run = client.run("run", weights=folder)
    assert run.push_weights({"w": np.ones(3, np.float32)}).policy_version == 5
    assert gateway.names() == ["GetVersions", "StartUpdate", "UpdateWeights", "FinishUpdate"]
    assert gateway.state.disk is not None
    assert gateway.state.disk.path == str(folder.root / "v00000005")
    assert gateway.state.disk.checksum == safetensors.checksum(folder.root / "v00000005")


def test_an_update_that_fails_is_aborted(
    gateway: GatewayDouble, client: Client, folder: paceline.WeightFolder
) -> None:
    gateway.state.failures["UpdateWeights"] = [(grpc.StatusCode.DATA_LOSS, "checksum differs", [])]
    with pytest.raises(paceline.DataLossError):
        client.run("run", weights=folder).push_weights({"w": np.ones(3, np.float32)})
    assert gateway.names()[-1] == "AbortUpdate"
    assert client.versions().policy_version == 4


def test_an_update_whose_answer_was_lost_counts_as_published(
    gateway: GatewayDouble, client: Client, folder: paceline.WeightFolder
) -> None:
    gateway.state.failures["FinishUpdate.answer"] = [(grpc.StatusCode.INTERNAL, "cut", [])]
    assert client.run("run", weights=folder).push_weights({"w": np.ones(3, np.float32)}).policy_version == 5
    assert "AbortUpdate" not in gateway.names()


def test_adapters_need_a_folder_to_be_written_to(
    gateway: GatewayDouble, client: Client, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="WeightFolder"):
        client.run("run").push_adapter(tmp_path)
    assert "StartUpdate" not in gateway.names()
