"""The vocabulary of the SDK: requests, samples, weight updates and the fleet.

Plain frozen records, one module for each part of the protocol. Arrays are numpy; `[n]` in a docstring is a shape.
Instants are seconds since the Unix epoch, durations are seconds.
"""

from paceline.types.fleet import (
    Decision,
    Drafter,
    Instance,
    InstanceLoad,
    InstanceState,
    KnobChange,
    KnobSetting,
)
from paceline.types.rollouts import (
    Batch,
    BatchHint,
    Exactness,
    ExactnessLevel,
    Group,
    LogprobsMode,
    Reward,
    SampleKey,
    SampleRequest,
    SamplingParams,
    Submitted,
    TokenIds,
)
from paceline.types.samples import (
    DraftSource,
    FinishReason,
    InstanceSpan,
    Logprobs,
    Provenance,
    Sample,
    SampleEvent,
    SampleStatus,
    TokenDelta,
    VersionSpan,
)
from paceline.types.weights import (
    InFlight,
    InstanceUpdate,
    StreamStarted,
    UpdateFinished,
    UpdateStarted,
    Versions,
    WeightTarget,
)

__all__ = [
    "Batch",
    "BatchHint",
    "Decision",
    "DraftSource",
    "Drafter",
    "Exactness",
    "ExactnessLevel",
    "FinishReason",
    "Group",
    "InFlight",
    "Instance",
    "InstanceLoad",
    "InstanceSpan",
    "InstanceState",
    "InstanceUpdate",
    "KnobChange",
    "KnobSetting",
    "Logprobs",
    "LogprobsMode",
    "Provenance",
    "Reward",
    "Sample",
    "SampleEvent",
    "SampleKey",
    "SampleRequest",
    "SampleStatus",
    "SamplingParams",
    "StreamStarted",
    "Submitted",
    "TokenDelta",
    "TokenIds",
    "UpdateFinished",
    "UpdateStarted",
    "VersionSpan",
    "Versions",
    "WeightTarget",
]
