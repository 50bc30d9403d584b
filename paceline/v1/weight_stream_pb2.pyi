from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WeightPiece(_message.Message):
    __slots__ = ("position", "file", "offset", "data", "crc", "index", "last")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    position: int
    file: int
    offset: int
    data: bytes
    crc: int
    index: bool
    last: bool
    def __init__(self, position: _Optional[int] = ..., file: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc: _Optional[int] = ..., index: bool = ..., last: bool = ...) -> None: ...

class PushWeightsRequest(_message.Message):
    __slots__ = ("piece",)
    PIECE_FIELD_NUMBER: _ClassVar[int]
    piece: WeightPiece
    def __init__(self, piece: _Optional[_Union[WeightPiece, _Mapping]] = ...) -> None: ...

class PushWeightsResponse(_message.Message):
    __slots__ = ("received", "confirmed")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    received: int
    confirmed: int
    def __init__(self, received: _Optional[int] = ..., confirmed: _Optional[int] = ...) -> None: ...
