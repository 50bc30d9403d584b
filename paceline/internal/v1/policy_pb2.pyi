import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from paceline.v1 import knobs_pb2 as _knobs_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ApplyKnobsRequest(_message.Message):
    __slots__ = ("revision", "knobs", "runs", "run_caps", "step_time")
    class RunsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _knobs_pb2.Knobs
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_knobs_pb2.Knobs, _Mapping]] = ...) -> None: ...
    class RunCapsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REVISION_FIELD_NUMBER: _ClassVar[int]
    KNOBS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    RUN_CAPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    revision: int
    knobs: _knobs_pb2.Knobs
    runs: _containers.MessageMap[str, _knobs_pb2.Knobs]
    run_caps: _containers.ScalarMap[str, int]
    step_time: str
    def __init__(self, revision: _Optional[int] = ..., knobs: _Optional[_Union[_knobs_pb2.Knobs, _Mapping]] = ..., runs: _Optional[_Mapping[str, _knobs_pb2.Knobs]] = ..., run_caps: _Optional[_Mapping[str, int]] = ..., step_time: _Optional[str] = ...) -> None: ...

class ApplyKnobsResponse(_message.Message):
    __slots__ = ("revision", "speculates")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SPECULATES_FIELD_NUMBER: _ClassVar[int]
    revision: int
    speculates: bool
    def __init__(self, revision: _Optional[int] = ..., speculates: bool = ...) -> None: ...

class GetSpeculationReportRequest(_message.Message):
    __slots__ = ("after_switch",)
    AFTER_SWITCH_FIELD_NUMBER: _ClassVar[int]
    after_switch: int
    def __init__(self, after_switch: _Optional[int] = ...) -> None: ...

class DraftTally(_message.Message):
    __slots__ = ("drafter", "verifications", "drafted", "accepted", "drafted_lengths", "accepted_lengths")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    VERIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    verifications: int
    drafted: int
    accepted: int
    drafted_lengths: _containers.RepeatedScalarFieldContainer[int]
    accepted_lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, drafter: _Optional[str] = ..., verifications: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., drafted_lengths: _Optional[_Iterable[int]] = ..., accepted_lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class StepTally(_message.Message):
    __slots__ = ("run_id", "step", "reasons", "planned_tokens", "expected_tokens", "predicted_gain", "predicted_time", "measured_time", "drafts", "mode", "lacking_steps")
    class ReasonsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    PLANNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_GAIN_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TIME_FIELD_NUMBER: _ClassVar[int]
    MEASURED_TIME_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LACKING_STEPS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    reasons: _containers.ScalarMap[str, int]
    planned_tokens: int
    expected_tokens: float
    predicted_gain: float
    predicted_time: _duration_pb2.Duration
    measured_time: _duration_pb2.Duration
    drafts: _containers.RepeatedCompositeFieldContainer[DraftTally]
    mode: str
    lacking_steps: int
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., reasons: _Optional[_Mapping[str, int]] = ..., planned_tokens: _Optional[int] = ..., expected_tokens: _Optional[float] = ..., predicted_gain: _Optional[float] = ..., predicted_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., measured_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., drafts: _Optional[_Iterable[_Union[DraftTally, _Mapping]]] = ..., mode: _Optional[str] = ..., lacking_steps: _Optional[int] = ...) -> None: ...

class Switch(_message.Message):
    __slots__ = ("serial", "time", "on", "predicted_speedup", "requests", "run_id", "step")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    ON_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_SPEEDUP_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    serial: int
    time: _timestamp_pb2.Timestamp
    on: bool
    predicted_speedup: float
    requests: int
    run_id: str
    step: int
    def __init__(self, serial: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., on: bool = ..., predicted_speedup: _Optional[float] = ..., requests: _Optional[int] = ..., run_id: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class GetSpeculationReportResponse(_message.Message):
    __slots__ = ("instance_id", "epoch", "revision", "steps", "switches", "calibration", "model", "pool", "own_knobs")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    OWN_KNOBS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    epoch: int
    revision: int
    steps: _containers.RepeatedCompositeFieldContainer[StepTally]
    switches: _containers.RepeatedCompositeFieldContainer[Switch]
    calibration: str
    model: str
    pool: str
    own_knobs: _knobs_pb2.Knobs
    def __init__(self, instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., revision: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[StepTally, _Mapping]]] = ..., switches: _Optional[_Iterable[_Union[Switch, _Mapping]]] = ..., calibration: _Optional[str] = ..., model: _Optional[str] = ..., pool: _Optional[str] = ..., own_knobs: _Optional[_Union[_knobs_pb2.Knobs, _Mapping]] = ...) -> None: ...

class GetKnobsRequest(_message.Message):
    __slots__ = ("run_id", "model", "pool")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    model: str
    pool: str
    def __init__(self, run_id: _Optional[str] = ..., model: _Optional[str] = ..., pool: _Optional[str] = ...) -> None: ...

class GetKnobsResponse(_message.Message):
    __slots__ = ("revision", "knobs", "ladder_cap", "effective", "pending_instance_ids")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    KNOBS_FIELD_NUMBER: _ClassVar[int]
    LADDER_CAP_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_FIELD_NUMBER: _ClassVar[int]
    PENDING_INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    knobs: _knobs_pb2.Knobs
    ladder_cap: int
    effective: _containers.RepeatedCompositeFieldContainer[_knobs_pb2.EffectiveKnobs]
    pending_instance_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, revision: _Optional[int] = ..., knobs: _Optional[_Union[_knobs_pb2.Knobs, _Mapping]] = ..., ladder_cap: _Optional[int] = ..., effective: _Optional[_Iterable[_Union[_knobs_pb2.EffectiveKnobs, _Mapping]]] = ..., pending_instance_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class SetKnobsRequest(_message.Message):
    __slots__ = ("run_id", "model", "pool", "revision", "knobs")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    KNOBS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    model: str
    pool: str
    revision: int
    knobs: _knobs_pb2.Knobs
    def __init__(self, run_id: _Optional[str] = ..., model: _Optional[str] = ..., pool: _Optional[str] = ..., revision: _Optional[int] = ..., knobs: _Optional[_Union[_knobs_pb2.Knobs, _Mapping]] = ...) -> None: ...

class SetKnobsResponse(_message.Message):
    __slots__ = ("revision", "applied", "pending")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    revision: int
    applied: _containers.RepeatedScalarFieldContainer[str]
    pending: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, revision: _Optional[int] = ..., applied: _Optional[_Iterable[str]] = ..., pending: _Optional[_Iterable[str]] = ...) -> None: ...
