"""The procedure of a weight update, step by step, with answers given by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline import calls, safetensors
from paceline import types as t
from paceline.errors import CancelledError, DataLossError, InternalError
from paceline.weights import push


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def versions(policy: int, drafter: int = 0) -> t.Versions:
    return t.Versions(policy, drafter, "", "", "", ())


def follow(steps: calls.Steps[Any], answers: dict[str, Any]) -> tuple[list[str], Any]:
    """Drives the procedure; an answer may be an exception, or a list of one for each time."""
    made: list[str] = []
    step: Any = next(steps)
    try:
        while True:
            answer = step.work() if isinstance(step, calls.Local) else answers[step.method]
            if isinstance(step, calls.Unary):
                made.append(step.method)
                answer = answer.pop(0) if isinstance(answer, list) else answer
            send: Callable[[Any], Any] = steps.throw if isinstance(answer, BaseException) else steps.send
            step = send(answer)
    except StopIteration as done:
        return made, done.value
    except BaseException as error:
        return made, error


STARTED = t.UpdateStarted("u1", 4)


def test_the_next_version_is_pushed(folder: Path) -> None:
    asked: list[int] = []

    def folder_of(version: int) -> Path:
        asked.append(version)
        return folder

    finished = t.UpdateFinished(5, ())
    answers = {"GetVersions": versions(4), "StartUpdate": STARTED, "UpdateWeights": ()}
    made, result = follow(
        push("run", t.WeightTarget.POLICY, folder_of), {**answers, "FinishUpdate": finished}
    )
    assert (made, asked) == (["GetVersions", "StartUpdate", "UpdateWeights", "FinishUpdate"], [5])
    assert result == finished


def test_a_drafter_has_versions_of_its_own(folder: Path) -> None:
    steps = push("run", t.WeightTarget.DRAFTER, lambda version: folder)
    next(steps)
    step = steps.send(versions(4, drafter=9))
    while isinstance(step, calls.Local):
        step = steps.send(step.work())
    assert step.request.version == 10  # type: ignore[attr-defined]


def test_the_checksum_of_the_folder_is_sent(folder: Path) -> None:
    steps = push("run", t.WeightTarget.POLICY, lambda version: folder)
    next(steps)
    step: Any = steps.send(versions(4))
    while isinstance(step, calls.Local):
        step = steps.send(step.work())
    update: Any = steps.send(STARTED)
    assert update.request.disk.checksum == safetensors.checksum(folder)


@pytest.mark.parametrize("error", [DataLossError(grpc.StatusCode.DATA_LOSS, "checksum"), KeyboardInterrupt()])
def test_whatever_ends_the_update_aborts_it(folder: Path, error: BaseException) -> None:
    answers = {
        "GetVersions": versions(4),
        "StartUpdate": STARTED,
        "UpdateWeights": error,
        "AbortUpdate": InternalError(grpc.StatusCode.INTERNAL, "cannot be aborted either"),
    }
    made, result = follow(push("run", t.WeightTarget.POLICY, lambda version: folder), answers)
    assert made[-1] == "AbortUpdate"
    assert result is error, "the first error is the one to report"


def test_a_lost_answer_is_judged_by_what_is_published(folder: Path) -> None:
    answers = {"StartUpdate": STARTED, "UpdateWeights": (), "AbortUpdate": 4}
    lost = CancelledError(grpc.StatusCode.CANCELLED, "cut")
    for published, expected in ((5, t.UpdateFinished(5, ())), (4, lost)):
        versions_seen = [versions(4), versions(published)]
        made, result = follow(
            push("run", t.WeightTarget.POLICY, lambda version: folder),
            {**answers, "GetVersions": versions_seen, "FinishUpdate": lost},
        )
        assert result == expected
        assert ("AbortUpdate" in made) == (published == 4)
