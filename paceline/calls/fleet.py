"""Calls of FleetService."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from paceline import convert
from paceline import types as t
from paceline.calls.caller import Caller
from paceline.convert.messages import record
from paceline.convert.values import seconds
from paceline.knobs import knobs_to_proto
from paceline.transport import Stream, Unary
from paceline.v1 import fleet_pb2


class FleetCalls(Caller):
    """Instances, knobs, decisions and the drafter that is trained online."""

    async def instances(self) -> tuple[t.Instance, ...]:
        """Return all instances of the fleet."""
        return convert.instances(
            await self.call(Unary("Fleet", "ListInstances", fleet_pb2.ListInstancesRequest()))
        )

    def watch_fleet(self) -> AsyncIterator[tuple[t.Instance, ...]]:
        """Iterate over the states of the fleet: the current one, then each change; without end."""
        return self.events(FleetView().stream())

    async def pause(self, instance_ids: Sequence[str] = ()) -> tuple[str, ...]:
        """Pause engine steps of instances (none named: all) and return their ids; no sample is lost."""
        request = convert.message(fleet_pb2.PauseRequest, instance_ids=instance_ids)
        return tuple((await self.call(Unary("Fleet", "Pause", request))).instance_ids)

    async def resume(self, instance_ids: Sequence[str] = ()) -> tuple[str, ...]:
        """Resume paused instances (none named: all) and return their ids."""
        request = convert.message(fleet_pb2.ResumeRequest, instance_ids=instance_ids)
        return tuple((await self.call(Unary("Fleet", "Resume", request))).instance_ids)

    async def drain(self, instance_id: str) -> int:
        """Drain an instance for good; return how many samples were handed over."""
        request = convert.message(fleet_pb2.DrainRequest, instance_id=instance_id)
        return int((await self.call(Unary("Fleet", "Drain", request, slow=True))).handed_over)

    async def knobs(self, run_id: str = "", *, model: str = "", pool: str = "") -> t.KnobSetting:
        """Return the knobs set for a run, a model or a pool, and those in use; without a name, for the whole fleet.

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
        """Publish the drafter before this version again; return its version. AbortedError: another is published."""
        request = convert.message(fleet_pb2.RollBackDrafterRequest, drafter_version=version, reason=reason)
        return int((await self.call(Unary("Fleet", "RollBackDrafter", request, slow=True))).drafter_version)

    def watch_decisions(
        self, run_id: str = "", since: float | None = None, *, kept: bool = False
    ) -> AsyncIterator[t.Decision]:
        """Iterate over decisions as they are made, without end: those of a run and of the fleet, or all.

        With `since` (unix seconds), first over kept decisions from that time on. With `kept` over kept ones only:
        all of them without `since`.
        """
        return self.events(DecisionPlace(run_id, since, kept).stream())


@dataclass(slots=True)
class FleetView:
    """The state of the fleet that was read last, which comes again when a stream is opened again."""

    _last: tuple[t.Instance, ...] | None = None

    def stream(self) -> Stream[tuple[t.Instance, ...]]:
        """Return the stream of states; it has no end, so one that ends was cut."""
        return Stream(
            "Fleet", "WatchFleet", fleet_pb2.WatchFleetRequest, self.take, lambda: False, begins_at_once=True
        )

    def take(self, answer: fleet_pb2.WatchFleetResponse) -> Iterator[tuple[t.Instance, ...]]:
        """Yield the state, unless it is the one that was read last."""
        state = convert.instances(answer)
        if state != self._last:
            self._last = state
            yield state


@dataclass(slots=True)
class DecisionPlace:
    """Position in the decision log: a time, and the decisions of that time that were read."""

    run_id: str
    since: float | None
    kept: bool = False
    _seen: list[t.Decision] = field(default_factory=list)

    def stream(self) -> Stream[t.Decision]:
        """Return the stream from here on; one that ends was cut, unless only kept decisions are read."""
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
