"""Stand-in for the stream of a sample that has arrived and that no gateway has claimed yet."""

from __future__ import annotations

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import fleet_pb2
from services.generation.loop.samples import RunningSample
from services.generation.loop.work_stream import WorkStream

# Handle of the only sample on such a stream.
HANDLE = 0


class Unclaimed:
    """Stream that keeps the events of its sample until it is handed over. For the engine thread only."""

    background = False

    def __init__(self) -> None:
        self.samples: dict[int, RunningSample] = {}
        self._ended: RunningSample | None = None
        self._finished: pb.Finished | None = None
        self._refused: pb.Refused | None = None

    def add(self, sample: RunningSample, now: float) -> None:
        """Take in the sample."""
        self.samples[sample.handle] = sample

    def reached(self, sample: RunningSample) -> None:
        """Do nothing: tokens stay with the sample."""

    def finish(self, sample: RunningSample, event: pb.Finished) -> None:
        """Keep the end of the sample."""
        self._ended, self._finished = sample, event
        self.samples.clear()

    def refuse(self, event: pb.Refused) -> None:
        """Keep the refusal of the sample."""
        self._refused = event
        self.samples.clear()

    def flush(
        self, load: fleet_pb2.InstanceLoad, policy_version: int, now: float, *, everything: bool = False
    ) -> None:
        """Do nothing: tokens stay with the sample."""

    def put(self, event: Exception | None) -> None:
        """Do nothing: a gateway that claims the sample finds the engine gone."""

    def hand_over(self, stream: WorkStream, handle: int, now: float) -> None:
        """Give the sample to a gateway's stream; its tokens, and its end if any, go out with the next flush."""
        if self._refused is not None:
            self._refused.handle = handle
            stream.refuse(self._refused)
        elif self._ended is not None and self._finished is not None:
            self._ended.handle = self._finished.handle = handle
            stream.finish(self._ended, self._finished)
        else:
            for sample in self.samples.values():
                stream.take_over(sample, handle, now)
