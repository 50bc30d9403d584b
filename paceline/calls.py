"""Every call of the public protocol as plain data: which method, what is sent, how the answer is read.

The sync and the async client send the same calls; what a call means is said here once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from paceline import convert
from paceline import types as t
from paceline.v1 import fleet_pb2, rollout_pb2, weight_pb2

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Unary(Generic[R_co]):
    """A call with one answer. `slow` ones wait for instances, such as for weights to be read."""

    service: str
    method: str
    request: Message
    read: Callable[[Any], R_co]
    slow: bool = False
    streams_request: bool = False
    """The one request is sent as a stream of one."""


@dataclass(frozen=True, slots=True)
class Stream(Generic[R_co]):
    """A call with many answers, which can be made again to go on.

    `request()` is what to send now; `read` gives the event, or None for one that was seen already;
    `complete()` is false while a stream that ended without an error must have been cut short.
    """

    service: str
    method: str
    request: Callable[[], Message]
    read: Callable[[Any], R_co | None]
    complete: Callable[[], bool] = lambda: True
    resumable: bool = True
    """False: a failure after the first event is raised."""


@dataclass(frozen=True, slots=True)
class Local(Generic[R_co]):
    """Work on this machine that takes a while, such as writing weights."""

    work: Callable[[], R_co]


Steps = Generator[Unary[Any] | Local[Any], Any, R]
"""A procedure of several calls: yields each one, is sent its result or thrown its error."""


# RolloutService


def submit(batch: t.Batch) -> Unary[t.Submitted]:
    """SubmitRollouts."""
    return Unary("Rollout", "SubmitRollouts", convert.batch_to_proto(batch), convert.submitted)


def stream(run_id: str, batch_id: str, cursor: int) -> Stream[t.SampleEvent]:
    """StreamRollouts from a cursor, each event once."""
    place = BatchPlace(run_id, batch_id, cursor)
    return Stream("Rollout", "StreamRollouts", place.request, place.read, place.complete)


@dataclass(slots=True)
class BatchPlace:
    """How far a batch's stream has been read."""

    run_id: str
    batch_id: str
    cursor: int
    missing: int = 0
    """Samples that the last event said were still to come."""

    def request(self) -> Message:
        """Asks for what follows the last event read."""
        return rollout_pb2.StreamRolloutsRequest(
            run_id=self.run_id, batch_id=self.batch_id, cursor=self.cursor
        )

    def read(self, answer: rollout_pb2.StreamRolloutsResponse) -> t.SampleEvent | None:
        """The event; None when it is not after the cursor."""
        if answer.cursor <= self.cursor:
            return None
        self.cursor, self.missing = answer.cursor, answer.total - answer.finished
        return convert.sample_event(answer)

    def complete(self) -> bool:
        """True when no sample is known to be missing."""
        return self.missing <= 0


def generate(request: t.SampleRequest) -> Stream[t.TokenDelta | t.Sample]:
    """Generate: deltas, then the sample."""
    message = convert.sample_request_to_proto(request)
    return Stream("Rollout", "Generate", lambda: message, convert.generate_event, resumable=False)


def cancel(run_id: str, batch_id: str, samples: Iterable[t.SampleKey], keep_partial: bool) -> Unary[int]:
    """CancelRollouts."""
    keys = [rollout_pb2.SampleKey(prompt_id=key.prompt_id, slot=key.slot) for key in samples]
    request = rollout_pb2.CancelRolloutsRequest(
        run_id=run_id, batch_id=batch_id, samples=keys, keep_partial=keep_partial
    )
    return Unary("Rollout", "CancelRollouts", request, lambda answer: int(answer.cancelled))


def hint(hint: t.BatchHint) -> Unary[int]:
    """HintNextBatch."""
    return Unary("Rollout", "HintNextBatch", convert.hint_to_proto(hint), lambda answer: int(answer.samples))


def report_rewards(
    run_id: str,
    batch_id: str,
    rewards: Iterable[t.Reward],
    kl: float | None,
    clip_fraction: float | None,
) -> Unary[int]:
    """ReportRewards."""
    messages = [rollout_pb2.Reward(prompt_id=r.prompt_id, slot=r.slot, reward=r.reward) for r in rewards]
    request = rollout_pb2.ReportRewardsRequest(
        run_id=run_id, batch_id=batch_id, rewards=messages, kl=kl, clip_fraction=clip_fraction
    )
    return Unary("Rollout", "ReportRewards", request, lambda answer: int(answer.matched))


# WeightService


def start_update(run_id: str, version: int, target: t.WeightTarget) -> Unary[t.UpdateStarted]:
    """StartUpdate of weights on disk."""
    request = weight_pb2.StartUpdateRequest(
        run_id=run_id,
        version=version,
        target=convert.target_to_proto(target),
        transport=weight_pb2.WEIGHT_TRANSPORT_DISK,
    )
    return Unary("Weight", "StartUpdate", request, convert.update_started)


def update_weights(update_id: str, path: str, checksum: str) -> Unary[tuple[t.InstanceUpdate, ...]]:
    """UpdateWeights with a folder: every instance checks and stages it."""
    disk = weight_pb2.DiskWeights(path=path, checksum=checksum)
    request = weight_pb2.UpdateWeightsRequest(update_id=update_id, disk=disk)
    return Unary("Weight", "UpdateWeights", request, convert.staged, slow=True, streams_request=True)


def finish_update(update_id: str) -> Unary[t.UpdateFinished]:
    """FinishUpdate: applied and published."""
    request = weight_pb2.FinishUpdateRequest(update_id=update_id)
    return Unary("Weight", "FinishUpdate", request, convert.update_finished, slow=True)


def abort_update(update_id: str) -> Unary[int]:
    """AbortUpdate."""
    request = weight_pb2.AbortUpdateRequest(update_id=update_id)
    return Unary("Weight", "AbortUpdate", request, lambda answer: int(answer.current_version))


def versions() -> Unary[t.Versions]:
    """GetVersions."""
    return Unary("Weight", "GetVersions", weight_pb2.GetVersionsRequest(), convert.versions)


# FleetService


def instances() -> Unary[tuple[t.Instance, ...]]:
    """ListInstances."""
    return Unary("Fleet", "ListInstances", fleet_pb2.ListInstancesRequest(), convert.instances)


def watch_fleet() -> Stream[tuple[t.Instance, ...]]:
    """WatchFleet."""
    return Stream("Fleet", "WatchFleet", fleet_pb2.WatchFleetRequest, convert.instances)


def pause(instance_ids: Sequence[str]) -> Unary[tuple[str, ...]]:
    """Pause; no ids is all."""
    request = fleet_pb2.PauseRequest(instance_ids=instance_ids)
    return Unary("Fleet", "Pause", request, lambda answer: tuple(answer.instance_ids))


def resume(instance_ids: Sequence[str]) -> Unary[tuple[str, ...]]:
    """Resume; no ids is all."""
    request = fleet_pb2.ResumeRequest(instance_ids=instance_ids)
    return Unary("Fleet", "Resume", request, lambda answer: tuple(answer.instance_ids))


def drain(instance_id: str) -> Unary[int]:
    """Drain."""
    request = fleet_pb2.DrainRequest(instance_id=instance_id)
    return Unary("Fleet", "Drain", request, lambda answer: int(answer.handed_over), slow=True)


def policy(run_id: str, model: str, pool: str) -> Unary[t.Policy]:
    """GetPolicy."""
    request = fleet_pb2.GetPolicyRequest(run_id=run_id, model=model, pool=pool)
    return Unary("Fleet", "GetPolicy", request, convert.policy)


def set_policy(run_id: str, policy: t.Policy, model: str, pool: str) -> Unary[t.PolicyChange]:
    """SetPolicy: the knobs, and the revision that they were made from."""
    request = fleet_pb2.SetPolicyRequest(
        run_id=run_id,
        revision=policy.revision,
        knobs=convert.knobs_to_proto(policy.knobs),
        model=model,
        pool=pool,
    )
    return Unary("Fleet", "SetPolicy", request, convert.policy_change)


def drafter() -> Unary[t.Drafter]:
    """GetDrafter."""
    return Unary("Fleet", "GetDrafter", fleet_pb2.GetDrafterRequest(), convert.drafter)


def roll_back_drafter(version: int, reason: str) -> Unary[int]:
    """RollBackDrafter, from a version; the one published then."""
    request = fleet_pb2.RollBackDrafterRequest(version=version, reason=reason)
    return Unary("Fleet", "RollBackDrafter", request, lambda answer: int(answer.version), slow=True)


def watch_decisions(run_id: str, since: float | None) -> Stream[t.Decision]:
    """WatchDecisions, each decision once."""
    place = DecisionPlace(run_id, since)
    return Stream("Fleet", "WatchDecisions", place.request, place.take, lambda: False)


@dataclass(slots=True)
class DecisionPlace:
    """How far decisions have been read: up to a time, and of that time these."""

    run_id: str
    since: float | None
    _seen: list[t.Decision] = field(default_factory=list)

    def request(self) -> fleet_pb2.WatchDecisionsRequest:
        """What to send: go on from here."""
        request = fleet_pb2.WatchDecisionsRequest(run_id=self.run_id)
        if self.since is not None:
            request.since.FromNanoseconds(int(self.since * 1e9))
        return request

    def take(self, answer: fleet_pb2.WatchDecisionsResponse) -> t.Decision | None:
        """The decision; None when it was read before."""
        decision = convert.decision(answer)
        if decision in self._seen:
            return None
        if self.since is None or decision.time > self.since:
            self.since, self._seen = decision.time, []
        self._seen.append(decision)
        return decision
