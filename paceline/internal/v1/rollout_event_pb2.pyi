from paceline.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SerializedEvent(_message.Message):
    __slots__ = ("cursor", "sample", "finished", "total", "earlier", "open", "calls")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    sample: bytes
    finished: int
    total: int
    earlier: _containers.RepeatedCompositeFieldContainer[SerializedSample]
    open: bool
    calls: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.SampleCall]
    def __init__(self, cursor: _Optional[int] = ..., sample: _Optional[bytes] = ..., finished: _Optional[int] = ..., total: _Optional[int] = ..., earlier: _Optional[_Iterable[_Union[SerializedSample, _Mapping]]] = ..., open: bool = ..., calls: _Optional[_Iterable[_Union[_rollout_pb2.SampleCall, _Mapping]]] = ...) -> None: ...

class SerializedSample(_message.Message):
    __slots__ = ("cursor", "sample")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    sample: bytes
    def __init__(self, cursor: _Optional[int] = ..., sample: _Optional[bytes] = ...) -> None: ...

class MergedSample(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: MergedColumns
    def __init__(self, tokens: _Optional[_Union[MergedColumns, _Mapping]] = ...) -> None: ...

class MergedColumns(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
