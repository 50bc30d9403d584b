from paceline.v1 import weight_stream_pb2 as _weight_stream_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FetchWeightsRequest(_message.Message):
    __slots__ = ("update_id", "policy_version", "checksum", "position")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    policy_version: int
    checksum: str
    position: int
    def __init__(self, update_id: _Optional[str] = ..., policy_version: _Optional[int] = ..., checksum: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class FetchWeightsResponse(_message.Message):
    __slots__ = ("piece", "available")
    PIECE_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    piece: _weight_stream_pb2.WeightPiece
    available: int
    def __init__(self, piece: _Optional[_Union[_weight_stream_pb2.WeightPiece, _Mapping]] = ..., available: _Optional[int] = ...) -> None: ...

class PeerWeights(_message.Message):
    __slots__ = ("update_id", "ticket", "peers", "checksum", "has_successor")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    HAS_SUCCESSOR_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    ticket: str
    peers: _containers.RepeatedScalarFieldContainer[str]
    checksum: str
    has_successor: bool
    def __init__(self, update_id: _Optional[str] = ..., ticket: _Optional[str] = ..., peers: _Optional[_Iterable[str]] = ..., checksum: _Optional[str] = ..., has_successor: bool = ...) -> None: ...
