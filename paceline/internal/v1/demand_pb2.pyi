import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from paceline.v1 import fleet_pb2 as _fleet_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetDemandRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDemandResponse(_message.Message):
    __slots__ = ("waiting_samples", "waiting_tokens", "running_samples", "running_tokens", "batches", "instances")
    WAITING_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    waiting_samples: int
    waiting_tokens: float
    running_samples: int
    running_tokens: float
    batches: _containers.RepeatedCompositeFieldContainer[BatchDemand]
    instances: _containers.RepeatedCompositeFieldContainer[InstanceDemand]
    def __init__(self, waiting_samples: _Optional[int] = ..., waiting_tokens: _Optional[float] = ..., running_samples: _Optional[int] = ..., running_tokens: _Optional[float] = ..., batches: _Optional[_Iterable[_Union[BatchDemand, _Mapping]]] = ..., instances: _Optional[_Iterable[_Union[InstanceDemand, _Mapping]]] = ...) -> None: ...

class BatchDemand(_message.Message):
    __slots__ = ("time_left", "tokens_left")
    TIME_LEFT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    time_left: _duration_pb2.Duration
    tokens_left: float
    def __init__(self, time_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., tokens_left: _Optional[float] = ...) -> None: ...

class InstanceDemand(_message.Message):
    __slots__ = ("instance_id", "epoch", "state", "running", "max_running", "generated_tokens")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    epoch: int
    state: _fleet_pb2.InstanceState
    running: int
    max_running: int
    generated_tokens: int
    def __init__(self, instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[_fleet_pb2.InstanceState, str]] = ..., running: _Optional[int] = ..., max_running: _Optional[int] = ..., generated_tokens: _Optional[int] = ...) -> None: ...
