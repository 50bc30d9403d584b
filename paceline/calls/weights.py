"""Calls of WeightService."""

from __future__ import annotations

from pathlib import Path

from paceline import convert
from paceline import types as t
from paceline.calls.caller import Caller
from paceline.transport import Unary
from paceline.v1 import weight_pb2


class WeightUpdateCalls(Caller):
    """Phases of a weight update."""

    async def start_update(
        self, run_id: str, version: int, target: t.WeightTarget = t.WeightTarget.POLICY
    ) -> t.UpdateStarted:
        """Start the weight update to a version above the current one."""
        request = weight_pb2.StartUpdateRequest(
            run_id=run_id,
            policy_version=version if target is t.WeightTarget.POLICY else 0,
            drafter_version=version if target is t.WeightTarget.DRAFTER else 0,
            target=convert.target_to_proto(target),
            transport=weight_pb2.WEIGHT_TRANSPORT_DISK,
        )
        return convert.update_started(await self.call(Unary("Weight", "StartUpdate", request)))

    async def update_weights(
        self, update_id: str, path: Path | str, checksum: str = "", delta: Path | None = None
    ) -> tuple[t.InstanceUpdate, ...]:
        """Let every instance check and stage a folder (absolute path as the instances see it).

        `delta` is a folder with what changed since the published version, for instances that hold that one.
        """
        disk = weight_pb2.DiskWeights(path=str(path), checksum=checksum, delta=str(delta or ""))
        request = weight_pb2.UpdateWeightsRequest(update_id=update_id, disk=disk)
        return convert.staged(
            await self.call(Unary("Weight", "UpdateWeights", request, slow=True, streams_request=True))
        )

    async def start_stream(
        self, run_id: str, version: int, target: t.WeightTarget = t.WeightTarget.POLICY
    ) -> t.StreamStarted:
        """Start an update whose weights are pushed to an instance, or name an instance that lives now."""
        request = weight_pb2.StartUpdateRequest(
            run_id=run_id,
            policy_version=version if target is t.WeightTarget.POLICY else 0,
            drafter_version=version if target is t.WeightTarget.DRAFTER else 0,
            target=convert.target_to_proto(target),
            transport=weight_pb2.WEIGHT_TRANSPORT_STREAM,
        )
        answer = await self.call(Unary("Weight", "StartUpdate", request))
        return convert.stream_started(answer, version)

    async def update_streamed(self, update_id: str, checksum: str) -> tuple[t.InstanceUpdate, ...]:
        """Let every instance check and stage what was pushed."""
        streamed = weight_pb2.StreamedWeights(checksum=checksum)
        request = weight_pb2.UpdateWeightsRequest(update_id=update_id, streamed=streamed)
        return convert.staged(
            await self.call(Unary("Weight", "UpdateWeights", request, slow=True, streams_request=True))
        )

    async def finish_update(
        self, update_id: str, in_flight: t.InFlight = t.InFlight.REFUSE
    ) -> t.UpdateFinished:
        """Apply the staged weights between two engine steps and publish the version."""
        request = weight_pb2.FinishUpdateRequest(
            update_id=update_id, in_flight=convert.in_flight_to_proto(in_flight)
        )
        return convert.update_finished(await self.call(Unary("Weight", "FinishUpdate", request, slow=True)))

    async def abort_update(self, update_id: str) -> int:
        """Abort an unfinished update; return the version that is served."""
        request = weight_pb2.AbortUpdateRequest(update_id=update_id)
        return int((await self.call(Unary("Weight", "AbortUpdate", request))).policy_version)

    async def versions(self) -> t.Versions:
        """Return the published versions."""
        return convert.versions(
            await self.call(Unary("Weight", "GetVersions", weight_pb2.GetVersionsRequest()))
        )
