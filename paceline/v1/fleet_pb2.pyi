import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from paceline.v1 import knobs_pb2 as _knobs_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InstanceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INSTANCE_STATE_UNSPECIFIED: _ClassVar[InstanceState]
    INSTANCE_STATE_STALE: _ClassVar[InstanceState]
    INSTANCE_STATE_SERVING: _ClassVar[InstanceState]
    INSTANCE_STATE_PAUSED: _ClassVar[InstanceState]
    INSTANCE_STATE_DRAINING: _ClassVar[InstanceState]
    INSTANCE_STATE_DEAD: _ClassVar[InstanceState]
INSTANCE_STATE_UNSPECIFIED: InstanceState
INSTANCE_STATE_STALE: InstanceState
INSTANCE_STATE_SERVING: InstanceState
INSTANCE_STATE_PAUSED: InstanceState
INSTANCE_STATE_DRAINING: InstanceState
INSTANCE_STATE_DEAD: InstanceState

class InstanceLoad(_message.Message):
    __slots__ = ("running", "waiting", "kv_usage", "step_time", "generated_tokens", "steps")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_usage: float
    step_time: _duration_pb2.Duration
    generated_tokens: int
    steps: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., step_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., generated_tokens: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class Instance(_message.Message):
    __slots__ = ("instance_id", "epoch", "address", "state", "policy_version", "load", "max_running", "max_model_len", "vocab_size", "model", "device", "registered_at", "metrics_address", "refused_features", "keeps_kv")
    class RefusedFeaturesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_AT_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FEATURES_FIELD_NUMBER: _ClassVar[int]
    KEEPS_KV_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    epoch: int
    address: str
    state: InstanceState
    policy_version: int
    load: InstanceLoad
    max_running: int
    max_model_len: int
    vocab_size: int
    model: str
    device: str
    registered_at: _timestamp_pb2.Timestamp
    metrics_address: str
    refused_features: _containers.ScalarMap[str, str]
    keeps_kv: bool
    def __init__(self, instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., state: _Optional[_Union[InstanceState, str]] = ..., policy_version: _Optional[int] = ..., load: _Optional[_Union[InstanceLoad, _Mapping]] = ..., max_running: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., model: _Optional[str] = ..., device: _Optional[str] = ..., registered_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., metrics_address: _Optional[str] = ..., refused_features: _Optional[_Mapping[str, str]] = ..., keeps_kv: bool = ...) -> None: ...

class ListInstancesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListInstancesResponse(_message.Message):
    __slots__ = ("instances",)
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    instances: _containers.RepeatedCompositeFieldContainer[Instance]
    def __init__(self, instances: _Optional[_Iterable[_Union[Instance, _Mapping]]] = ...) -> None: ...

class WatchFleetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchFleetResponse(_message.Message):
    __slots__ = ("instances",)
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    instances: _containers.RepeatedCompositeFieldContainer[Instance]
    def __init__(self, instances: _Optional[_Iterable[_Union[Instance, _Mapping]]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("instance_ids",)
    INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    instance_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, instance_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("instance_ids",)
    INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    instance_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, instance_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("instance_ids",)
    INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    instance_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, instance_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("instance_ids",)
    INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    instance_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, instance_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("instance_id",)
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    def __init__(self, instance_id: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("handed_over",)
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    handed_over: int
    def __init__(self, handed_over: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("revision", "knobs", "effective", "pending_instance_ids")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    KNOBS_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_FIELD_NUMBER: _ClassVar[int]
    PENDING_INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    knobs: _knobs_pb2.Knobs
    effective: _containers.RepeatedCompositeFieldContainer[_knobs_pb2.EffectiveKnobs]
    pending_instance_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, revision: _Optional[int] = ..., knobs: _Optional[_Union[_knobs_pb2.Knobs, _Mapping]] = ..., effective: _Optional[_Iterable[_Union[_knobs_pb2.EffectiveKnobs, _Mapping]]] = ..., pending_instance_ids: _Optional[_Iterable[str]] = ...) -> None: ...

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
    __slots__ = ("revision", "applied_instance_ids", "pending_instance_ids")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    APPLIED_INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    PENDING_INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    applied_instance_ids: _containers.RepeatedScalarFieldContainer[str]
    pending_instance_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, revision: _Optional[int] = ..., applied_instance_ids: _Optional[_Iterable[str]] = ..., pending_instance_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchDecisionsRequest(_message.Message):
    __slots__ = ("run_id", "since", "kept")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    since: _timestamp_pb2.Timestamp
    kept: bool
    def __init__(self, run_id: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., kept: bool = ...) -> None: ...

class WatchDecisionsResponse(_message.Message):
    __slots__ = ("time", "kind", "reason", "predicted_gain", "details", "run_id")
    TIME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_GAIN_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    kind: str
    reason: str
    predicted_gain: float
    details: _struct_pb2.Struct
    run_id: str
    def __init__(self, time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., kind: _Optional[str] = ..., reason: _Optional[str] = ..., predicted_gain: _Optional[float] = ..., details: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., run_id: _Optional[str] = ...) -> None: ...

class GetDrafterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDrafterResponse(_message.Message):
    __slots__ = ("drafter_version", "published_at", "path", "updates", "samples_used", "policy_version", "candidate_acceptance_length", "acceptance_length", "rejected_candidates", "rollbacks")
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_AT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_USED_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    REJECTED_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    drafter_version: int
    published_at: _timestamp_pb2.Timestamp
    path: str
    updates: int
    samples_used: int
    policy_version: int
    candidate_acceptance_length: float
    acceptance_length: float
    rejected_candidates: int
    rollbacks: int
    def __init__(self, drafter_version: _Optional[int] = ..., published_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., path: _Optional[str] = ..., updates: _Optional[int] = ..., samples_used: _Optional[int] = ..., policy_version: _Optional[int] = ..., candidate_acceptance_length: _Optional[float] = ..., acceptance_length: _Optional[float] = ..., rejected_candidates: _Optional[int] = ..., rollbacks: _Optional[int] = ...) -> None: ...

class RollBackDrafterRequest(_message.Message):
    __slots__ = ("drafter_version", "reason")
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    drafter_version: int
    reason: str
    def __init__(self, drafter_version: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class RollBackDrafterResponse(_message.Message):
    __slots__ = ("drafter_version",)
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    drafter_version: int
    def __init__(self, drafter_version: _Optional[int] = ...) -> None: ...
