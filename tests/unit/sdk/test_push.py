"""The procedure of a weight update, step by step, with answers given by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2

from paceline import types as t
from paceline.aio import AsyncRun
from paceline.blocking import finish
from paceline.calls import GatewayCalls
from paceline.errors import (
    CancelledError,
    DataLossError,
    FailedPreconditionError,
    InternalError,
    PacelineError,
    UnavailableError,
    UnimplementedError,
)
from paceline.v1 import weight_pb2 as pb
from paceline.weights import safetensors
from paceline.weights.folder import push_folder
from paceline.weights.version_push import VersionPush, WeightTransport
from tests.unit.sdk.scripted_transport import ScriptedTransport


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def versions(policy: int, drafter: int = 0) -> pb.GetVersionsResponse:
    return pb.GetVersionsResponse(policy_version=policy, drafter_version=drafter)


async def push(
    client: GatewayCalls,
    folder_of: Callable[[int], Path],
    delta_of: Callable[[t.Versions, Path], Path | None] = lambda *_: None,
    target: t.WeightTarget = t.WeightTarget.POLICY,
) -> t.UpdateFinished:
    return await push_folder(client, await VersionPush.begin(client, "run", target), folder_of, delta_of)


def pushed(
    answers: dict[str, Any], folder_of: Callable[[int], Path], target: t.WeightTarget = t.WeightTarget.POLICY
) -> tuple[ScriptedTransport, Any]:
    """Push, and return the calls and what came of it."""
    transport = ScriptedTransport(answers)
    try:
        return transport, finish(push(GatewayCalls(transport), folder_of, target=target))
    except BaseException as error:
        return transport, error


ACCEPTED = {
    "GetVersions": versions(4),
    "StartUpdate": pb.StartUpdateResponse(update_id="u1"),
    "UpdateWeights": pb.UpdateWeightsResponse(),
}


def test_the_next_version_is_pushed(folder: Path) -> None:
    asked: list[int] = []

    def folder_of(version: int) -> Path:
        asked.append(version)
        return folder

    answers = {**ACCEPTED, "FinishUpdate": pb.FinishUpdateResponse(policy_version=5)}
    client, result = pushed(answers, folder_of)
    assert (client.made, asked) == (["GetVersions", "StartUpdate", "UpdateWeights", "FinishUpdate"], [5])
    assert result == t.UpdateFinished(5, 0, ())


def test_a_drafter_has_versions_of_its_own(folder: Path) -> None:
    answers = {
        **ACCEPTED,
        "GetVersions": versions(4, drafter=9),
        "FinishUpdate": pb.FinishUpdateResponse(drafter_version=10),
    }
    client, _ = pushed(answers, lambda version: folder, t.WeightTarget.DRAFTER)
    assert client.requests["StartUpdate"].drafter_version == 10


def test_the_checksum_of_the_folder_is_sent(folder: Path) -> None:
    client, _ = pushed(
        {**ACCEPTED, "FinishUpdate": pb.FinishUpdateResponse(policy_version=5)}, lambda version: folder
    )
    assert client.requests["UpdateWeights"].disk.checksum == safetensors.checksum(folder)


def lost() -> FailedPreconditionError:
    info = error_details_pb2.ErrorInfo(reason="WEIGHTS_NOT_STAGED")
    return FailedPreconditionError(grpc.StatusCode.FAILED_PRECONDITION, "all instances are gone", [info])


def test_weights_whose_instances_are_gone_are_staged_again(folder: Path) -> None:
    answers = {**ACCEPTED, "FinishUpdate": [lost(), pb.FinishUpdateResponse(policy_version=5)]}
    client, result = pushed(answers, lambda version: folder)
    assert client.made.count("UpdateWeights") == 2
    assert client.made.count("StartUpdate") == 1
    assert result == t.UpdateFinished(5, 0, ())


def test_weights_that_are_lost_again_and_again_are_given_up(folder: Path) -> None:
    answers = {**ACCEPTED, "FinishUpdate": lost(), "AbortUpdate": pb.AbortUpdateResponse()}
    client, result = pushed(answers, lambda version: folder)
    assert client.made.count("UpdateWeights") == 3
    assert client.made[-1] == "AbortUpdate"
    assert result.reason == "WEIGHTS_NOT_STAGED"


def test_what_changed_since_the_published_version_is_named_beside_the_folder(folder: Path) -> None:
    asked: list[tuple[int, Path]] = []

    def delta_of(published: t.Versions, written: Path) -> Path:
        asked.append((published.policy_version, written))
        return folder / "delta"

    answers = {**ACCEPTED, "FinishUpdate": pb.FinishUpdateResponse(policy_version=5)}
    transport = ScriptedTransport(answers)
    finish(push(GatewayCalls(transport), lambda version: folder, delta_of))
    assert asked == [(4, folder)]
    sent = transport.requests["UpdateWeights"].disk
    assert (sent.path, sent.delta) == (str(folder), str(folder / "delta"))


@pytest.mark.parametrize("error", [DataLossError(grpc.StatusCode.DATA_LOSS, "checksum"), KeyboardInterrupt()])
def test_whatever_ends_the_update_aborts_it(folder: Path, error: BaseException) -> None:
    answers = {
        **ACCEPTED,
        "UpdateWeights": error,
        "AbortUpdate": InternalError(grpc.StatusCode.INTERNAL, "cannot be aborted either"),
    }
    client, result = pushed(answers, lambda version: folder)
    assert client.made[-1] == "AbortUpdate"
    assert result is error, "the first error is the one to report"


def refusal(reason: str = "SAMPLES_UNFINISHED") -> FailedPreconditionError:
    info = error_details_pb2.ErrorInfo(
        reason=reason, metadata={"update_id": "u1", "version": "5", "unfinished": "12"}
    )
    return FailedPreconditionError(grpc.StatusCode.FAILED_PRECONDITION, "12 samples", [info])


def test_weights_that_samples_keep_waiting_stay_staged_and_are_finished_later(folder: Path) -> None:
    transport = ScriptedTransport(
        {
            **ACCEPTED,
            "FinishUpdate": [
                refusal("KV_NOT_KEPT"),
                refusal(),
                pb.FinishUpdateResponse(policy_version=5, continued_samples=3),
            ],
        }
    )
    run = AsyncRun(GatewayCalls(transport), "run", 7, None)
    with pytest.raises(ValueError, match="no push that was refused"):
        finish(run.finish_push())
    for attempt in (run.push_weights(folder, in_flight=t.InFlight.KEEP_KV), run.finish_push()):
        with pytest.raises(FailedPreconditionError) as refused:
            finish(attempt)
        assert refused.value.metadata["unfinished"] == "12"
    assert "AbortUpdate" not in transport.made
    assert transport.requests["FinishUpdate"].in_flight == pb.IN_FLIGHT_REFUSE
    done = finish(run.finish_push(in_flight=t.InFlight.CONTINUE))
    assert done == t.UpdateFinished(5, 0, (), 0, 3)
    assert transport.requests["FinishUpdate"] == pb.FinishUpdateRequest(
        update_id="u1", in_flight=pb.IN_FLIGHT_CONTINUE
    )
    assert transport.made.count("UpdateWeights") == 1, "they are sent once"
    with pytest.raises(ValueError, match="no push that was refused"):
        finish(run.finish_push())


@pytest.mark.parametrize("error", [refusal(), CancelledError(grpc.StatusCode.CANCELLED, "cut")])
def test_why_an_update_was_not_finished_is_said_although_the_versions_are_unknown(
    folder: Path, error: PacelineError
) -> None:
    gone = UnavailableError(grpc.StatusCode.UNAVAILABLE, "gone")
    answers = {
        **ACCEPTED,
        "GetVersions": [versions(4), gone, gone],
        "FinishUpdate": error,
        "AbortUpdate": pb.AbortUpdateResponse(),
    }
    client, result = pushed(answers, lambda version: folder)
    assert result is error
    assert ("AbortUpdate" in client.made) == isinstance(error, CancelledError)


def test_tensors_go_by_stream_and_a_folder_as_it_is_unless_the_run_names_a_transport(folder: Path) -> None:
    refused = UnimplementedError(grpc.StatusCode.UNIMPLEMENTED, "of another release")
    for source, transport in (
        ({"w": np.ones(2, np.float32)}, pb.WEIGHT_TRANSPORT_STREAM),
        (folder, pb.WEIGHT_TRANSPORT_DISK),
    ):
        gateway = ScriptedTransport({**ACCEPTED, "StartUpdate": refused})
        with pytest.raises(UnimplementedError, match="another release"):
            finish(AsyncRun(GatewayCalls(gateway), "run", 7, None).push_weights(source))
        assert gateway.requests["StartUpdate"].transport == transport


@pytest.mark.parametrize("in_flight", list(t.InFlight))
def test_the_treatment_of_samples_in_flight_is_sent(folder: Path, in_flight: t.InFlight) -> None:
    transport = ScriptedTransport({**ACCEPTED, "FinishUpdate": pb.FinishUpdateResponse(policy_version=5)})
    finish(AsyncRun(GatewayCalls(transport), "run", 7, None).push_weights(folder, in_flight=in_flight))
    sent = pb.InFlight.Name(transport.requests["FinishUpdate"].in_flight)
    assert sent == f"IN_FLIGHT_{in_flight.name}"


def test_a_lost_answer_is_judged_by_what_is_published(folder: Path) -> None:
    lost = CancelledError(grpc.StatusCode.CANCELLED, "cut")
    for published, expected in ((5, t.UpdateFinished(5, 0, ())), (4, lost)):
        answers = {
            **ACCEPTED,
            "GetVersions": [versions(4), versions(published)],
            "FinishUpdate": lost,
            "AbortUpdate": pb.AbortUpdateResponse(policy_version=4),
        }
        client, result = pushed(answers, lambda version: folder)
        assert result == expected
        assert ("AbortUpdate" in client.made) == (published == 4)


class OwnTransport(WeightTransport):
    """A transport of somebody else: it names a folder that exists already."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pruned = folder, 0

    async def push(
        self, client: GatewayCalls, push: VersionPush, tensors: safetensors.Tensors, in_flight: t.InFlight
    ) -> t.UpdateFinished:
        return await push_folder(client, push, lambda _: self.folder, in_flight=in_flight)

    def prune(self) -> None:
        self.pruned += 1


def test_a_run_pushes_by_any_transport_and_one_refuses_what_it_cannot_carry(folder: Path) -> None:
    gateway = ScriptedTransport({**ACCEPTED, "FinishUpdate": pb.FinishUpdateResponse(policy_version=5)})
    own = OwnTransport(folder)
    run = AsyncRun(GatewayCalls(gateway), "run", 7, own)
    assert finish(run.push_weights({"w": np.ones(2, np.float32)})).policy_version == 5
    assert (gateway.requests["UpdateWeights"].disk.path, own.pruned) == (str(folder), 1)
    with pytest.raises(ValueError, match=r"weights=WeightFolder"):
        finish(run.push_adapter(folder))
    assert (gateway.made.count("StartUpdate"), own.pruned) == (1, 1)
