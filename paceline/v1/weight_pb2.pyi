import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WeightTarget(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHT_TARGET_UNSPECIFIED: _ClassVar[WeightTarget]
    WEIGHT_TARGET_POLICY: _ClassVar[WeightTarget]
    WEIGHT_TARGET_DRAFTER: _ClassVar[WeightTarget]

class WeightTransport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHT_TRANSPORT_UNSPECIFIED: _ClassVar[WeightTransport]
    WEIGHT_TRANSPORT_DISK: _ClassVar[WeightTransport]
    WEIGHT_TRANSPORT_STREAM: _ClassVar[WeightTransport]
    WEIGHT_TRANSPORT_DEVICE: _ClassVar[WeightTransport]

class InFlight(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IN_FLIGHT_UNSPECIFIED: _ClassVar[InFlight]
    IN_FLIGHT_REFUSE: _ClassVar[InFlight]
    IN_FLIGHT_ABORT: _ClassVar[InFlight]
    IN_FLIGHT_CONTINUE: _ClassVar[InFlight]
    IN_FLIGHT_KEEP_KV: _ClassVar[InFlight]
WEIGHT_TARGET_UNSPECIFIED: WeightTarget
WEIGHT_TARGET_POLICY: WeightTarget
WEIGHT_TARGET_DRAFTER: WeightTarget
WEIGHT_TRANSPORT_UNSPECIFIED: WeightTransport
WEIGHT_TRANSPORT_DISK: WeightTransport
WEIGHT_TRANSPORT_STREAM: WeightTransport
WEIGHT_TRANSPORT_DEVICE: WeightTransport
IN_FLIGHT_UNSPECIFIED: InFlight
IN_FLIGHT_REFUSE: InFlight
IN_FLIGHT_ABORT: InFlight
IN_FLIGHT_CONTINUE: InFlight
IN_FLIGHT_KEEP_KV: InFlight

class StartUpdateRequest(_message.Message):
    __slots__ = ("run_id", "policy_version", "target", "transport", "drafter_version", "push_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    policy_version: int
    target: WeightTarget
    transport: WeightTransport
    drafter_version: int
    push_id: str
    def __init__(self, run_id: _Optional[str] = ..., policy_version: _Optional[int] = ..., target: _Optional[_Union[WeightTarget, str]] = ..., transport: _Optional[_Union[WeightTransport, str]] = ..., drafter_version: _Optional[int] = ..., push_id: _Optional[str] = ...) -> None: ...

class StartUpdateResponse(_message.Message):
    __slots__ = ("update_id", "policy_version", "stream")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    policy_version: int
    stream: StreamTarget
    def __init__(self, update_id: _Optional[str] = ..., policy_version: _Optional[int] = ..., stream: _Optional[_Union[StreamTarget, _Mapping]] = ...) -> None: ...

class StreamTarget(_message.Message):
    __slots__ = ("instance_id", "address", "ticket")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    address: str
    ticket: str
    def __init__(self, instance_id: _Optional[str] = ..., address: _Optional[str] = ..., ticket: _Optional[str] = ...) -> None: ...

class DiskWeights(_message.Message):
    __slots__ = ("path", "checksum", "delta")
    PATH_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    path: str
    checksum: str
    delta: str
    def __init__(self, path: _Optional[str] = ..., checksum: _Optional[str] = ..., delta: _Optional[str] = ...) -> None: ...

class StreamedWeights(_message.Message):
    __slots__ = ("checksum",)
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    checksum: str
    def __init__(self, checksum: _Optional[str] = ...) -> None: ...

class WeightChunk(_message.Message):
    __slots__ = ("tensor", "dtype", "shape", "offset", "data", "crc")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC_FIELD_NUMBER: _ClassVar[int]
    tensor: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    data: bytes
    crc: int
    def __init__(self, tensor: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc: _Optional[int] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("update_id", "disk", "chunk", "streamed")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    STREAMED_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    disk: DiskWeights
    chunk: WeightChunk
    streamed: StreamedWeights
    def __init__(self, update_id: _Optional[str] = ..., disk: _Optional[_Union[DiskWeights, _Mapping]] = ..., chunk: _Optional[_Union[WeightChunk, _Mapping]] = ..., streamed: _Optional[_Union[StreamedWeights, _Mapping]] = ...) -> None: ...

class InstanceUpdate(_message.Message):
    __slots__ = ("instance_id", "applied", "policy_version", "checksum", "error", "stage_time", "apply_time", "dropped_blocks", "kept_samples")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STAGE_TIME_FIELD_NUMBER: _ClassVar[int]
    APPLY_TIME_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    applied: bool
    policy_version: int
    checksum: str
    error: str
    stage_time: _duration_pb2.Duration
    apply_time: _duration_pb2.Duration
    dropped_blocks: int
    kept_samples: int
    def __init__(self, instance_id: _Optional[str] = ..., applied: bool = ..., policy_version: _Optional[int] = ..., checksum: _Optional[str] = ..., error: _Optional[str] = ..., stage_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., apply_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., dropped_blocks: _Optional[int] = ..., kept_samples: _Optional[int] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("instances",)
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    instances: _containers.RepeatedCompositeFieldContainer[InstanceUpdate]
    def __init__(self, instances: _Optional[_Iterable[_Union[InstanceUpdate, _Mapping]]] = ...) -> None: ...

class FinishUpdateRequest(_message.Message):
    __slots__ = ("update_id", "in_flight")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    in_flight: InFlight
    def __init__(self, update_id: _Optional[str] = ..., in_flight: _Optional[_Union[InFlight, str]] = ...) -> None: ...

class FinishUpdateResponse(_message.Message):
    __slots__ = ("policy_version", "instances", "drafter_version", "aborted_samples", "continued_samples")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    ABORTED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    instances: _containers.RepeatedCompositeFieldContainer[InstanceUpdate]
    drafter_version: int
    aborted_samples: int
    continued_samples: int
    def __init__(self, policy_version: _Optional[int] = ..., instances: _Optional[_Iterable[_Union[InstanceUpdate, _Mapping]]] = ..., drafter_version: _Optional[int] = ..., aborted_samples: _Optional[int] = ..., continued_samples: _Optional[int] = ...) -> None: ...

class AbortUpdateRequest(_message.Message):
    __slots__ = ("update_id",)
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    def __init__(self, update_id: _Optional[str] = ...) -> None: ...

class AbortUpdateResponse(_message.Message):
    __slots__ = ("policy_version",)
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    def __init__(self, policy_version: _Optional[int] = ...) -> None: ...

class GetVersionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetVersionsResponse(_message.Message):
    __slots__ = ("policy_version", "drafter_version", "policy_path", "policy_checksum", "update_id", "instances")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    POLICY_PATH_FIELD_NUMBER: _ClassVar[int]
    POLICY_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    drafter_version: int
    policy_path: str
    policy_checksum: str
    update_id: str
    instances: _containers.RepeatedCompositeFieldContainer[InstanceUpdate]
    def __init__(self, policy_version: _Optional[int] = ..., drafter_version: _Optional[int] = ..., policy_path: _Optional[str] = ..., policy_checksum: _Optional[str] = ..., update_id: _Optional[str] = ..., instances: _Optional[_Iterable[_Union[InstanceUpdate, _Mapping]]] = ...) -> None: ...
