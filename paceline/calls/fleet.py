"""Calls of FleetService and WeightService: instances, knobs, the drafter, decisions, and weight updates."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import convert
from paceline import types as t
from paceline.calls.caller import Caller
from paceline.convert.fleet import knobs_to_proto
from paceline.convert.values import record, seconds
from paceline.transport.interface import Stream, Unary
from paceline.v1 import fleet_pb2, weight_pb2


class FleetCalls(Caller):
    """Instances, knobs, decisions and the drafter that is trained online."""

    async def instances(self) -> tuple[t.Instance, ...]:
        """Return all instances of the fleet."""
        return convert.instances(
            await self.call(Unary("Fleet", "ListInstances", fleet_pb2.ListInstancesRequest()))
        )

    def watch_fleet(self) -> AsyncIterator[tuple[t.Instance, ...]]:
        """Iterate over the states of the fleet: the current one, then each change; without end."""
        return self.events(_fleet_states())

    async def pause(self, instance_ids: Sequence[str] = ()) -> tuple[str, ...]:
        """Pause engine steps of instances (none named: all) and return their ids; no sample is lost."""
        request = convert.message(fleet_pb2.PauseRequest, instance_ids=instance_ids)
        return tuple((await self.call(Unary("Fleet", "Pause", request))).instance_ids)

    async def resume(self, instance_ids: Sequence[str] = ()) -> tuple[str, ...]:
        """Resume paused instances (none named: all) and return their ids."""
        request = convert.message(fleet_pb2.ResumeRequest, instance_ids=instance_ids)
        return tuple((await self.call(Unary("Fleet", "Resume", request))).instance_ids)

    async def drain(self, instance_id: str) -> int:
        """Drain an instance permanently; return how many samples were handed over."""
        request = convert.message(fleet_pb2.DrainRequest, instance_id=instance_id)
        return int((await self.call(Unary("Fleet", "Drain", request, slow=True))).handed_over)

    async def knobs(self, run_id: str = "", *, model: str = "", pool: str = "") -> t.KnobSetting:
        """Return the knobs set for a run, a model or a pool, and the knobs in use; without a name, of the fleet.

        UnavailableError: no policy service leads; instances keep the knobs that they have.
        """
        request = convert.message(fleet_pb2.GetKnobsRequest, run_id=run_id, model=model, pool=pool)
        return convert.knob_setting(await self.call(Unary("Fleet", "GetKnobs", request)))

    async def set_knobs(
        self, run_id: str, setting: t.KnobSetting, *, model: str = "", pool: str = ""
    ) -> t.KnobChange:
        """Replace the knobs of a scope, named as for `knobs`.

        AbortedError: the knobs have a later revision than `setting.revision`. The kill switch is
        `{"speculation": False}`: plain decoding everywhere.
        """
        record(setting, t.KnobSetting, "setting")
        request = convert.message(
            fleet_pb2.SetKnobsRequest,
            run_id=run_id,
            revision=setting.revision,
            knobs=knobs_to_proto(setting.knobs),
            model=model,
            pool=pool,
        )
        return convert.knob_change(await self.call(Unary("Fleet", "SetKnobs", request)))

    async def drafter(self) -> t.Drafter:
        """Return the published version of the drafter that is trained online, and its statistics."""
        return convert.drafter(await self.call(Unary("Fleet", "GetDrafter", fleet_pb2.GetDrafterRequest())))

    async def roll_back_drafter(self, version: int, reason: str = "") -> int:
        """Publish the predecessor of a drafter version again; return its version.

        AbortedError: another version is published.
        """
        request = convert.message(fleet_pb2.RollBackDrafterRequest, drafter_version=version, reason=reason)
        return int((await self.call(Unary("Fleet", "RollBackDrafter", request, slow=True))).drafter_version)

    def watch_decisions(
        self, run_id: str = "", since: float | None = None, *, kept: bool = False
    ) -> AsyncIterator[t.Decision]:
        """Iterate without end over decisions as they are made, about a run and the fleet; no run named: about all.

        With `since` (unix seconds), begin with the kept decisions from that time on. With `kept`, iterate over kept
        decisions only, without `since` over all of them.
        """
        return self.events(DecisionPlace(run_id, since, kept).stream())


def _fleet_states() -> Stream[tuple[t.Instance, ...]]:
    """Return the stream of the fleet's states, which has no end: if it ends, it was cut."""
    last: tuple[t.Instance, ...] | None = None

    def read(answer: fleet_pb2.WatchFleetResponse) -> Iterator[tuple[t.Instance, ...]]:
        nonlocal last
        state = convert.instances(answer)
        # A stream that is opened again begins with the current state.
        if state != last:
            last = state
            yield state

    return Stream(
        "Fleet", "WatchFleet", fleet_pb2.WatchFleetRequest, read, lambda: False, begins_at_once=True
    )


@dataclass(slots=True)
class DecisionPlace:
    """Position in the decision log: a time, and the decisions of that time that were read."""

    run_id: str
    since: float | None
    kept: bool = False
    _seen: list[t.Decision] = field(default_factory=list)

    def stream(self) -> Stream[t.Decision]:
        """Return the stream from this position on; if it ends, it was cut, unless only kept decisions are read."""
        return Stream("Fleet", "WatchDecisions", self.request, self.take, lambda: self.kept)

    def request(self) -> fleet_pb2.WatchDecisionsRequest:
        """Return the request that continues from here."""
        request = convert.message(fleet_pb2.WatchDecisionsRequest, run_id=self.run_id, kept=self.kept)
        if self.since is not None:
            request.since.FromNanoseconds(int(seconds(self.since, "since") * 1e9))
        return request

    def take(self, answer: fleet_pb2.WatchDecisionsResponse) -> Iterator[t.Decision]:
        """Yield the decision, unless it was read before."""
        decision = convert.decision(answer)
        if decision in self._seen:
            return
        if self.since is None or decision.time > self.since:
            self.since, self._seen = decision.time, []
        self._seen.append(decision)
        yield decision


class WeightUpdateCalls(Caller):
    """Phases of a weight update."""

    async def start_update(
        self, run_id: str, version: int, target: t.WeightTarget = t.WeightTarget.POLICY, push_id: str = ""
    ) -> t.UpdateStarted:
        """Start the weight update to a version above the current one.

        It replaces an unfinished update of the same run that was started with another `push_id`.
        """
        return convert.update_started(
            await self._start(run_id, version, target, weight_pb2.WEIGHT_TRANSPORT_DISK, push_id)
        )

    async def update_weights(
        self, update_id: str, path: Path | str, checksum: str = "", delta: Path | None = None
    ) -> tuple[t.InstanceUpdate, ...]:
        """Let every instance check and stage a folder (absolute path as the instances see it).

        `delta` is a folder with the changes since the published version, for instances that have that version.
        """
        disk = convert.message(
            weight_pb2.DiskWeights,
            path=_text(path),
            checksum=checksum,
            delta="" if delta is None else _text(delta),
        )
        return await self._stage(
            convert.message(weight_pb2.UpdateWeightsRequest, update_id=update_id, disk=disk)
        )

    async def start_stream(
        self, run_id: str, version: int, target: t.WeightTarget = t.WeightTarget.POLICY, push_id: str = ""
    ) -> t.StreamStarted:
        """Start an update whose weights are pushed to an instance, or return another instance for it."""
        answer = await self._start(run_id, version, target, weight_pb2.WEIGHT_TRANSPORT_STREAM, push_id)
        return convert.stream_started(answer, version)

    async def update_streamed(self, update_id: str, checksum: str) -> tuple[t.InstanceUpdate, ...]:
        """Let every instance check and stage the pushed weights."""
        streamed = convert.message(weight_pb2.StreamedWeights, checksum=checksum)
        return await self._stage(
            convert.message(weight_pb2.UpdateWeightsRequest, update_id=update_id, streamed=streamed)
        )

    async def finish_update(
        self, update_id: str, in_flight: t.InFlight = t.InFlight.REFUSE
    ) -> t.UpdateFinished:
        """Apply the staged weights between two engine steps and publish the version."""
        request = convert.message(
            weight_pb2.FinishUpdateRequest,
            update_id=update_id,
            in_flight=convert.in_flight_to_proto(in_flight),
        )
        return convert.update_finished(await self.call(Unary("Weight", "FinishUpdate", request, slow=True)))

    async def abort_update(self, update_id: str) -> int:
        """Abort an unfinished update; return the version that is served."""
        request = convert.message(weight_pb2.AbortUpdateRequest, update_id=update_id)
        # Slow, because the gateway waits for instances that do not answer.
        aborted = await self.call(Unary("Weight", "AbortUpdate", request, slow=True))
        return int(aborted.policy_version)

    async def versions(self) -> t.Versions:
        """Return the published versions."""
        return convert.versions(
            await self.call(Unary("Weight", "GetVersions", weight_pb2.GetVersionsRequest()))
        )

    async def _start(
        self,
        run_id: str,
        version: int,
        target: t.WeightTarget,
        transport: weight_pb2.WeightTransport,
        push_id: str,
    ) -> Any:
        request = convert.message(
            weight_pb2.StartUpdateRequest,
            run_id=run_id,
            policy_version=version if target is t.WeightTarget.POLICY else 0,
            drafter_version=version if target is t.WeightTarget.DRAFTER else 0,
            target=convert.target_to_proto(target),
            transport=transport,
            push_id=push_id,
        )
        return await self.call(Unary("Weight", "StartUpdate", request))

    async def _stage(self, request: weight_pb2.UpdateWeightsRequest) -> tuple[t.InstanceUpdate, ...]:
        staging = Unary("Weight", "UpdateWeights", request, slow=True, streams_request=True)
        return convert.staged(await self.call(staging))


def _text(path: Path | str) -> str:
    return str(path) if isinstance(path, Path) else path
