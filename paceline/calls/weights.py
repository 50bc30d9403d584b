"""Calls of WeightService."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import convert
from paceline import types as t
from paceline.calls.caller import Caller
from paceline.transport import Unary
from paceline.v1 import weight_pb2


class WeightUpdateCalls(Caller):
    """Phases of a weight update."""

    async def start_update(
        self, run_id: str, version: int, target: t.WeightTarget = t.WeightTarget.POLICY, push_id: str = ""
    ) -> t.UpdateStarted:
        """Start the weight update to a version above the current one.

        An unfinished update of the same run that was started with another `push_id` gives way.
        """
        return convert.update_started(
            await self._start(run_id, version, target, weight_pb2.WEIGHT_TRANSPORT_DISK, push_id)
        )

    async def update_weights(
        self, update_id: str, path: Path | str, checksum: str = "", delta: Path | None = None
    ) -> tuple[t.InstanceUpdate, ...]:
        """Let every instance check and stage a folder (absolute path as the instances see it).

        `delta` is a folder with what changed since the published version, for instances that hold that one.
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
        """Start an update whose weights are pushed to an instance, or name an instance that lives now."""
        answer = await self._start(run_id, version, target, weight_pb2.WEIGHT_TRANSPORT_STREAM, push_id)
        return convert.stream_started(answer, version)

    async def start_collective(
        self,
        run_id: str,
        version: int,
        target: t.WeightTarget,
        rendezvous: weight_pb2.CollectiveRendezvous,
        push_id: str = "",
    ) -> t.CollectiveStarted:
        """Start an update whose weights are broadcast, or name the instances that take part now."""
        transport = weight_pb2.WEIGHT_TRANSPORT_COLLECTIVE
        answer = await self._start(run_id, version, target, transport, push_id, rendezvous)
        return convert.collective_started(answer, version)

    async def update_streamed(
        self, update_id: str, checksum: str, left_out: Mapping[str, str] | None = None
    ) -> tuple[t.InstanceUpdate, ...]:
        """Let every instance check and stage what was pushed, but those that were left out, for a reason each."""
        streamed = convert.message(
            weight_pb2.StreamedWeights, checksum=checksum, left_out={} if left_out is None else left_out
        )
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
        # Instances that do not answer are waited for.
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
        rendezvous: weight_pb2.CollectiveRendezvous | None = None,
    ) -> Any:
        request = convert.message(
            weight_pb2.StartUpdateRequest,
            run_id=run_id,
            policy_version=version if target is t.WeightTarget.POLICY else 0,
            drafter_version=version if target is t.WeightTarget.DRAFTER else 0,
            target=convert.target_to_proto(target),
            transport=transport,
            collective=rendezvous,
            push_id=push_id,
        )
        return await self.call(Unary("Weight", "StartUpdate", request))

    async def _stage(self, request: weight_pb2.UpdateWeightsRequest) -> tuple[t.InstanceUpdate, ...]:
        staging = Unary("Weight", "UpdateWeights", request, slow=True, streams_request=True)
        return convert.staged(await self.call(staging))


def _text(path: Path | str) -> str:
    return str(path) if isinstance(path, Path) else path
