"""The heads of an instance: what is taken, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import drafter_pb2 as pb
from services.contracts import drafter_checkpoint
from services.contracts.drafter_checkpoint import Checkpoint
from services.contracts.errors import FailedPrecondition, InvalidArgument
from services.generation.drafters.draft_model import AcceptanceCounts, Eagle3Metrics
from services.generation.server.draft_model_service import DraftModelService
from tests.support.eagle3 import head_shape, random_head, save_head
from tests.support.models import tiny_model


@dataclass
class Engine:
    """Takes weights, and can fail at it."""

    swaps: list[tuple[str, Mapping[str, torch.Tensor]]] = field(default_factory=list)
    fault: Exception | None = None

    def swap_drafter(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.fault is not None:
            raise self.fault
        self.swaps.append((name, tensors))


@dataclass
class Drafter:
    """Knows what it was told."""

    metrics: Eagle3Metrics
    name: str = "eagle3"
    compared: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    versions: list[int] = field(default_factory=list)

    def swapped(self, version: int) -> None:
        self.versions.append(version)


class Loop:
    """Runs what it is asked to at once."""

    def __init__(self, engine: Engine) -> None:
        self.ready: Future[Engine] = Future()
        self.ready.set_result(engine)

    async def execute(self, function: Callable[[], Any]) -> Any:
        return function()


@dataclass
class Rig:
    """An instance with a head, and others to put in its place."""

    folder: Path
    started: Checkpoint
    registry: CollectorRegistry
    engine: Engine = field(default_factory=Engine)
    drafter: Drafter = field(init=False)

    def __post_init__(self) -> None:
        self.drafter = Drafter(Eagle3Metrics(self.registry))

    def models(self, *, without: bool = False) -> DraftModelService:
        path, drafter = (None, None) if without else (self.started.path, self.drafter)
        loop: Any = Loop(self.engine)
        return DraftModelService(path, loop, drafter)  # type: ignore[arg-type]

    def other(self, version: int, **changes: Any) -> Checkpoint:
        """Another head."""
        shape = replace(head_shape(self.folder / "model", draft_vocabulary=300), **changes)
        return save_head(random_head(shape, version), self.folder, version)

    def value(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"paceline_eagle3_{name}")


async def in_use(models: DraftModelService) -> pb.GetDraftModelResponse:
    return await models.GetDraftModel(pb.GetDraftModelRequest(), None)  # type: ignore[arg-type]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    model = tiny_model(tmp_path / "model")
    head = random_head(head_shape(model, draft_vocabulary=300), 1)
    return Rig(tmp_path, save_head(head, tmp_path, 1), CollectorRegistry())


async def test_a_head_takes_the_place_of_another(rig: Rig) -> None:
    models, second, third = rig.models(), rig.other(2), rig.other(3)
    assert await models.load(2, second.path, second.sha256) == 0
    assert await models.load(3, third.path, third.sha256) == 2
    ((name, tensors), _) = rig.engine.swaps
    assert name == "eagle3"
    assert tensors.keys() == drafter_checkpoint.load(second.path)[1].keys()
    assert rig.drafter.versions == [2, 3]
    found = await in_use(models)
    assert (found.drafter_version, found.sha256) == (3, third.sha256)
    # A head that is in use already changes nothing; an older one is a way back.
    assert await models.load(3, Path("/nowhere"), third.sha256) == 3
    assert len(rig.engine.swaps) == 2
    assert await models.load(2, second.path, second.sha256) == 3


async def test_another_head_of_the_same_version_is_loaded(rig: Rig) -> None:
    models, first, other = rig.models(), rig.other(2), rig.other(3)
    await models.load(2, first.path, first.sha256)
    assert await models.load(2, other.path, other.sha256) == 2
    assert (await in_use(models)).sha256 == other.sha256
    assert len(rig.engine.swaps) == 2
    with pytest.raises(InvalidArgument, match="SHA-256"):
        await models.load(2, other.path, first.sha256)
    assert (await in_use(models)).sha256 == other.sha256


async def test_what_became_of_drafts_is_told(rig: Rig) -> None:
    models = rig.models()
    rig.drafter.compared = AcceptanceCounts(5, 30, 20)
    found = await in_use(models)
    assert found.drafter_version == 0
    assert (found.drafts, found.draft_tokens, found.accepted_tokens) == (5, 30, 20)
    rig.drafter.compared.drafts += 1
    assert found.drafts == 5


def _truncate(made: Checkpoint) -> Checkpoint:
    weights = made.path / drafter_checkpoint.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-100])
    return made


def _other_sha(made: Checkpoint) -> Checkpoint:
    return replace(made, sha256="0" * 64)


def _gone(made: Checkpoint) -> Checkpoint:
    (made.path / drafter_checkpoint.CONFIG).unlink()
    return made


@pytest.mark.parametrize(
    ("spoil", "what"),
    [(_truncate, "SHA-256"), (_other_sha, "SHA-256"), (_gone, "config.json cannot be read")],
)
async def test_a_broken_checkpoint_is_refused(
    rig: Rig, spoil: Callable[[Checkpoint], Checkpoint], what: str
) -> None:
    models, broken = rig.models(), spoil(rig.other(2))
    with pytest.raises(InvalidArgument, match=what):
        await models.load(2, broken.path, broken.sha256)
    assert (rig.engine.swaps, rig.drafter.versions) == ([], [])
    assert rig.value("refused_total") == 1
    assert (await in_use(models)).drafter_version == 0
    # And is no hindrance to a good one.
    good = rig.other(3)
    assert await models.load(3, good.path, good.sha256) == 0


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"layers": (1,)}, "eagle_config"),
        ({"draft_vocab_size": 200}, "draft_vocab_size is 200, in use is 300"),
        ({"rope_theta": 5e5}, "rope_parameters"),
    ],
)
async def test_a_head_of_another_form_is_refused(rig: Rig, changes: dict[str, Any], what: str) -> None:
    models, unlike = rig.models(), rig.other(2, **changes)
    with pytest.raises(InvalidArgument, match=what):
        await models.load(2, unlike.path, unlike.sha256)
    assert rig.engine.swaps == []


async def test_fields_that_cannot_be_are_named(rig: Rig) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await rig.models().load(0, rig.started.path, "")
    assert [each.field for each in caught.value.violations] == ["version", "sha256"]


async def test_without_a_head_there_is_nothing_to_change(rig: Rig) -> None:
    models = rig.models(without=True)
    with pytest.raises(FailedPrecondition, match="no eagle3 drafter"):
        await models.load(1, rig.started.path, rig.started.sha256)
    with pytest.raises(FailedPrecondition, match="no eagle3 drafter"):
        await in_use(models)


async def test_a_load_that_fails_in_the_engine_is_an_error_and_no_new_version(rig: Rig) -> None:
    models, second = rig.models(), rig.other(2)
    rig.engine.fault = RuntimeError("half-way")
    with pytest.raises(RuntimeError, match="half-way"):
        await models.load(2, second.path, second.sha256)
    assert rig.drafter.versions == []
    assert (await in_use(models)).drafter_version == 0
