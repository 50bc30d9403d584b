"""The stream of a sample that has arrived and that no caller has claimed yet."""

from __future__ import annotations

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import fleet_pb2
from services.generation.samples import RunningSample, WorkStream

# The sample is alone on its stream.
HANDLE = 0


class Unclaimed:
    """Keeps what becomes of the sample, until it is handed over. Used by the engine thread only."""

    background = False

    def __init__(self) -> None:
        self.samples: dict[int, RunningSample] = {}
        self._ended: RunningSample | None = None
        self._finished: pb.Finished | None = None
        self._refused: pb.Refused | None = None

    def finish(self, sample: RunningSample, event: pb.Finished) -> None:
        """It has ended before it was claimed."""
        self._ended, self._finished = sample, event
        self.samples.clear()

    def refuse(self, event: pb.Refused) -> None:
        """It could not go on."""
        self._refused = event
        self.samples.clear()

    def flush(self, load: fleet_pb2.InstanceLoad, policy_version: int) -> None:
        """Nothing: its tokens stay with it."""

    def put(self, event: Exception | None) -> None:
        """Nothing: who would claim it finds the engine gone."""

    def hand_over(self, stream: WorkStream, handle: int) -> None:
        """Make the sample a stream's. Its tokens so far, and its end if it has one, go out with the next flush."""
        if self._refused is not None:
            self._refused.handle = handle
            stream.refuse(self._refused)
        elif self._ended is not None and self._finished is not None:
            self._ended.handle = self._finished.handle = handle
            stream.finish(self._ended, self._finished)
        else:
            for sample in self.samples.values():
                sample.handle, sample.stream = handle, stream
                stream.samples[handle] = sample
